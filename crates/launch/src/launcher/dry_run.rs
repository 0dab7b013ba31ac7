//! What would run where, as text.

use std::io::{Result, Write};

use super::host_plan::HostPlan;
use super::layout::Layout;
use super::program::quoted;

/// Prints a layout: a block per host.
pub(super) fn print(layout: &Layout, to: &mut impl Write) -> Result<()> {
    write!(to, "a run of {} ranks, meeting ", layout.world_size)?;
    match layout.random_port {
        true => writeln!(to, "on {}", layout.meeting.host)?,
        false => writeln!(to, "at {}", layout.meeting)?,
    }
    if let Some(mpi) = &layout.mpi {
        writeln!(to, "started: {}", in_shell(&mpi.words))?;
    }
    for plan in &layout.hosts {
        if plan.first_local_rank == 0 {
            print_host(plan, layout.random_port, to)?;
        }
        for local_rank in 0..plan.num_ranks {
            let [(rank, number), (local, local_number)] = plan.rank_env(local_rank);
            writeln!(
                to,
                "  rank {number}: {rank}={number} {local}={local_number}"
            )?;
        }
    }
    Ok(())
}

fn print_host(plan: &HostPlan, random_port: bool, to: &mut impl Write) -> Result<()> {
    writeln!(to, "\nhost {}", plan.host)?;
    let command = match &plan.via {
        Some(_) => plan.agent_words().join(" "),
        None if plan.through_mpi => "through MPI".to_string(),
        None => "directly".to_string(),
    };
    writeln!(to, "  started: {command}")?;
    writeln!(to, "  folder: {}", plan.folder)?;
    let words = std::iter::once(&plan.program).chain(&plan.args);
    writeln!(to, "  command: {}", in_shell(words))?;
    writeln!(to, "  environment of all its ranks:")?;
    for (name, value) in &plan.env {
        let value = match name.as_str() {
            "MASTER_PORT" if random_port => "(chosen at start)",
            "CANDLE_TRAIN_RUN_TOKEN" => "(a secret)",
            _ => value,
        };
        writeln!(to, "    {name}={value}")?;
    }
    Ok(())
}

fn in_shell<'a>(words: impl IntoIterator<Item = &'a String>) -> String {
    let words: Vec<_> = words.into_iter().map(|word| quoted(word)).collect();
    words.join(" ")
}
