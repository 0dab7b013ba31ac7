//! What would run where, as text.

use std::fmt::{self, Display};

use super::agent_command;
use super::layout::{Host, Layout};

/// Prints a layout: a block per host.
pub(super) struct DryRun<'a>(pub(super) &'a Layout);

impl Display for DryRun<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layout = self.0;
        let world_size = layout.world_size;
        write!(f, "a run of {world_size} ranks")?;
        match layout.random_port {
            true => writeln!(f, ", meeting on {}", layout.meeting.host)?,
            false => writeln!(f, ", meeting at {}", layout.meeting)?,
        }
        if let Some(mpi) = &layout.mpi {
            let words = mpi.words.iter().map(|word| agent_command::quoted(word));
            writeln!(f, "started: {}", words.collect::<Vec<_>>().join(" "))?;
        }
        for host in &layout.hosts {
            self.write_host(f, host)?;
        }
        Ok(())
    }
}

impl DryRun<'_> {
    fn write_host(&self, f: &mut fmt::Formatter<'_>, host: &Host) -> fmt::Result {
        let plan = &host.plan;
        if plan.first_local_rank > 0 {
            return Self::write_ranks(f, host);
        }
        writeln!(f, "\nhost {}", host.name)?;
        let command = match &host.via {
            Some(_) => agent_command::words(host).join(" "),
            None if plan.through_mpi => "through MPI".to_string(),
            None => "directly".to_string(),
        };
        writeln!(f, "  started: {command}")?;
        writeln!(f, "  folder: {}", plan.folder)?;
        write!(f, "  command: {}", agent_command::quoted(&plan.program))?;
        for arg in &plan.args {
            write!(f, " {}", agent_command::quoted(arg))?;
        }
        writeln!(f, "\n  environment of all its ranks:")?;
        for (name, value) in &plan.env {
            match name.as_str() {
                "MASTER_PORT" if self.0.random_port => writeln!(f, "    {name}=(chosen at start)")?,
                "CANDLE_TRAIN_RUN_TOKEN" => writeln!(f, "    {name}=(a secret)")?,
                _ => writeln!(f, "    {name}={value}")?,
            }
        }
        Self::write_ranks(f, host)
    }

    fn write_ranks(f: &mut fmt::Formatter<'_>, host: &Host) -> fmt::Result {
        let plan = &host.plan;
        for local_rank in 0..plan.num_ranks {
            let [(rank, number), (local, local_number)] = plan.rank_env(local_rank);
            writeln!(f, "  rank {number}: {rank}={number} {local}={local_number}")?;
        }
        Ok(())
    }
}
