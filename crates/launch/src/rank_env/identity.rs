//! The numbers of a rank, from the variables of one launcher.

use std::fmt;

use super::slurm_list;
use super::variables::{Named, Variables};
use crate::{Error, Result};

/// The launcher whose variables said who this process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartedBy {
    /// Nobody: no launcher's variables are set, the process is alone.
    Nobody,
    /// `candle-train launch`.
    CandleTrain,
    /// `torchrun`, or `accelerate launch`, which runs it.
    Torchrun,
    /// RANK and WORLD_SIZE were set by something else, for example by hand.
    Variables,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// A launcher that speaks PMI: `mpirun` of MPICH or Intel MPI, `srun --mpi=pmi2`.
    Pmi,
    /// Slurm's `srun`.
    Slurm,
}

impl StartedBy {
    /// Whether processes that it starts find each other by MPI.
    pub fn speaks_mpi(self) -> bool {
        matches!(self, Self::OpenMpi | Self::Pmi | Self::Slurm)
    }
}

impl fmt::Display for StartedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nobody => "no launcher",
            Self::CandleTrain => "candle-train launch",
            Self::Torchrun => "torchrun",
            Self::Variables => "the variables RANK and WORLD_SIZE",
            Self::OpenMpi => "Open MPI's mpirun",
            Self::Pmi => "a PMI launcher (MPICH's or Intel's mpirun)",
            Self::Slurm => "Slurm's srun",
        })
    }
}

/// Who a process is among its run's, and on its host.
#[derive(Debug, Clone)]
pub(super) struct Identity {
    pub(super) started_by: StartedBy,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) local_rank: usize,
    pub(super) local_world_size: usize,
}

/// Launchers, the innermost first, and their variables of rank, world size, local rank and local world size. A Slurm step may hold an
/// mpirun, and that a `torchrun`.
const LAUNCHERS: [(StartedBy, [&str; 4]); 3] = [
    (
        StartedBy::Variables,
        ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"],
    ),
    (
        StartedBy::OpenMpi,
        [
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ],
    ),
    (
        StartedBy::Pmi,
        ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
    ),
];

impl Identity {
    /// Reads the innermost launcher's variables.
    pub(super) fn read(vars: &Variables) -> Result<Self> {
        let is_ours = vars.is_set("CANDLE_TRAIN_RESTART_COUNT");
        // Ours takes away what an mpirun outside of it has set.
        let of_mpi = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"];
        let is_mpi_inside = is_ours && vars.first(&of_mpi).is_some();
        for (started_by, names) in LAUNCHERS.into_iter().skip(is_mpi_inside.into()) {
            let [rank, size, local_rank, local_size] = names;
            if !vars.is_set(rank) && !vars.is_set(size) {
                continue;
            }
            let (rank, size) = (vars.required(&[rank], size)?, vars.required(&[size], rank)?);
            let tasks = match started_by {
                // srun --mpi=pmi2 sets the first two only.
                StartedBy::Pmi if !vars.is_set(local_rank) => slurm_tasks_here(vars)?,
                _ => None,
            };
            let local = match tasks {
                Some(tasks) => (vars.required(&["SLURM_LOCALID"], rank.0)?, tasks),
                None => locals(vars, size, local_rank, local_size)?,
            };
            let started_by = match started_by {
                StartedBy::Variables if is_ours => StartedBy::CandleTrain,
                StartedBy::Variables if vars.is_set("TORCHELASTIC_RUN_ID") => StartedBy::Torchrun,
                started_by => started_by,
            };
            return Self::checked(started_by, rank, size, local);
        }
        let identity = Self::read_slurm(vars)?;
        if identity.started_by == StartedBy::Nobody && vars.is_set("MASTER_ADDR") {
            check_not_emptied(vars)?;
        }
        Ok(identity)
    }

    fn read_slurm(vars: &Variables) -> Result<Self> {
        let sizes = ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"];
        let size = vars.first_number(&sizes)?;
        let is_step = vars.is_set("SLURM_STEP_ID");
        // A batch script is no task, yet has SLURM_PROCID=0; the shell of an allocation has the sizes only.
        if !vars.is_set("SLURM_PROCID") || !is_step && size.is_none_or(|(_, tasks)| tasks == 1) {
            return Ok(Self {
                started_by: StartedBy::Nobody,
                rank: 0,
                world_size: 1,
                local_rank: 0,
                local_world_size: 1,
            });
        }
        if let (false, Some((name, tasks))) = (is_step, size) {
            return Err(Error::Environment(format!(
                "{name}={tasks}, but this process is no task of a Slurm step: SLURM_PROCID is set, SLURM_STEP_ID is not\n\
                 hint: put `srun` in front of the program in the batch script, or `candle-train launch` for one host; \
                 for a run of one process ask for one task (--ntasks=1)"
            )));
        }
        let rank = vars.required(&["SLURM_PROCID"], "SLURM_STEP_ID")?;
        let size = vars.required(&sizes, "SLURM_PROCID")?;
        let local = match slurm_tasks_here(vars)? {
            Some(tasks) => (vars.required(&["SLURM_LOCALID"], "SLURM_PROCID")?, tasks),
            None => locals(vars, size, "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")?,
        };
        Self::checked(StartedBy::Slurm, rank, size, local)
    }

    fn checked(
        started_by: StartedBy,
        rank: Named,
        world_size: Named,
        (local_rank, local_world_size): (Named, Named),
    ) -> Result<Self> {
        for ((name, rank), (size_name, size)) in
            [(rank, world_size), (local_rank, local_world_size)]
        {
            if rank >= size {
                return Err(Error::Environment(format!(
                    "{name}: expected a number below {size_name}={size}, got {rank}"
                )));
            }
        }
        if local_world_size.1 > world_size.1 {
            return Err(Error::Environment(format!(
                "{}={} is more than {}={}: a host cannot have more ranks than the run",
                local_world_size.0, local_world_size.1, world_size.0, world_size.1
            )));
        }
        Ok(Self {
            started_by,
            rank: rank.1,
            world_size: world_size.1,
            local_rank: local_rank.1,
            local_world_size: local_world_size.1,
        })
    }
}

/// Checks that the numbers of a rank are not there as empty texts: who is told where the ranks meet is not meant to be alone.
fn check_not_emptied(vars: &Variables) -> Result<()> {
    for name in ["RANK", "WORLD_SIZE"] {
        if vars.even_empty(name).is_some() && !vars.is_set(name) {
            return Err(Error::Environment(format!(
                "{name} is set to nothing, but MASTER_ADDR says where ranks meet\n\
                 hint: set {name} to a number, or unset both for a run of one process"
            )));
        }
    }
    Ok(())
}

/// Rank and number of ranks on this host. Both may be missing in a run of one rank only.
fn locals<'n>(
    vars: &Variables,
    (size_name, size): Named,
    rank: &'n str,
    local_size: &'n str,
) -> Result<(Named<'n>, Named<'n>)> {
    if size == 1 && !vars.is_set(rank) && !vars.is_set(local_size) {
        return Ok(((rank, 0), (local_size, 1)));
    }
    let of_size = format!("{size_name}={size}");
    let rank = vars.required(&[rank], &of_size)?;
    Ok((rank, vars.required(&[local_size], &of_size)?))
}

/// The number of tasks Slurm runs on this node, if it says so.
fn slurm_tasks_here(vars: &Variables) -> Result<Option<Named<'static>>> {
    let Some(node) = vars.number("SLURM_NODEID")? else {
        return Ok(None);
    };
    for name in ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"] {
        if let Some(list) = vars.get(name) {
            return Ok(Some((name, slurm_list::tasks_on_node(name, &list, node)?)));
        }
    }
    Ok(None)
}
