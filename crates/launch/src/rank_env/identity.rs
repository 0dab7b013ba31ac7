//! The numbers of a rank, from the variables of one launcher.

use super::slurm_list;
use super::started_by::StartedBy;
use super::variables::Variables;
use crate::{Error, Result};

/// Who a process is among its run's, and on its host.
pub(super) struct Identity {
    pub(super) started_by: StartedBy,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) local_rank: usize,
    pub(super) local_world_size: usize,
}

/// A number and the variable it came from.
type Named<'n> = (&'n str, usize);

impl Identity {
    /// Reads the innermost launcher's variables: a Slurm step may hold an mpirun, and that a `torchrun`.
    pub(super) fn read(vars: &Variables) -> Result<Self> {
        // Ours takes away what an mpirun outside of it has set.
        let is_mpi_inside = vars.is_set("CANDLE_TRAIN_RESTART_COUNT")
            && ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"]
                .iter()
                .any(|name| vars.is_set(name));
        if !is_mpi_inside && (vars.is_set("RANK") || vars.is_set("WORLD_SIZE")) {
            let started_by = if vars.is_set("CANDLE_TRAIN_RESTART_COUNT") {
                StartedBy::CandleTrain
            } else if vars.is_set("TORCHELASTIC_RUN_ID") {
                StartedBy::Torchrun
            } else {
                StartedBy::Variables
            };
            let (rank, size) = both(vars, "RANK", "WORLD_SIZE")?;
            let local = locals(vars, size, &["LOCAL_RANK"], &["LOCAL_WORLD_SIZE"])?;
            return Self::checked(started_by, rank, size, local);
        }
        if vars.is_set("OMPI_COMM_WORLD_RANK") || vars.is_set("OMPI_COMM_WORLD_SIZE") {
            let (rank, size) = both(vars, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")?;
            let local_rank = ["OMPI_COMM_WORLD_LOCAL_RANK"];
            let local = locals(vars, size, &local_rank, &["OMPI_COMM_WORLD_LOCAL_SIZE"])?;
            return Self::checked(StartedBy::OpenMpi, rank, size, local);
        }
        if vars.is_set("PMI_RANK") || vars.is_set("PMI_SIZE") {
            let (rank, size) = both(vars, "PMI_RANK", "PMI_SIZE")?;
            let local = match slurm_tasks_here(vars)? {
                // srun --mpi=pmi2 sets the first two only.
                Some(tasks) if !vars.is_set("MPI_LOCALRANKID") => {
                    let rank = required(vars, &["SLURM_LOCALID"], "PMI_RANK")?;
                    (rank, tasks)
                }
                _ => locals(vars, size, &["MPI_LOCALRANKID"], &["MPI_LOCALNRANKS"])?,
            };
            return Self::checked(StartedBy::Pmi, rank, size, local);
        }
        Self::read_slurm(vars)
    }

    fn read_slurm(vars: &Variables) -> Result<Self> {
        let sizes = ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"];
        let size = vars.first_number(&sizes)?;
        let is_step = vars.is_set("SLURM_STEP_ID");
        // A batch script is no task, yet has SLURM_PROCID=0; the shell of an allocation has the sizes only.
        match (vars.is_set("SLURM_PROCID"), size) {
            (false, _) => return Ok(Self::single()),
            (true, size) if !is_step && size.is_none_or(|(_, tasks)| tasks == 1) => {
                return Ok(Self::single());
            }
            (true, Some((name, tasks))) if !is_step => {
                return Err(Error::Environment(format!(
                    "{name}={tasks}, but this process is no task of a Slurm step: SLURM_PROCID is set, SLURM_STEP_ID is not\n\
                     hint: put `srun` in front of the program in the batch script, or `candle-train launch` for one host; \
                     for a run of one process ask for one task (--ntasks=1)"
                )));
            }
            _ => {}
        }
        let rank = required(vars, &["SLURM_PROCID"], "SLURM_STEP_ID")?;
        let size = required(vars, &sizes, "SLURM_PROCID")?;
        let local = match slurm_tasks_here(vars)? {
            Some(tasks) => (required(vars, &["SLURM_LOCALID"], "SLURM_PROCID")?, tasks),
            None => locals(
                vars,
                size,
                &["SLURM_LOCALID"],
                &["SLURM_STEP_TASKS_PER_NODE"],
            )?,
        };
        Self::checked(StartedBy::Slurm, rank, size, local)
    }

    fn single() -> Self {
        Self {
            started_by: StartedBy::Nobody,
            rank: 0,
            world_size: 1,
            local_rank: 0,
            local_world_size: 1,
        }
    }

    fn checked(
        started_by: StartedBy,
        rank: Named,
        world_size: Named,
        (local_rank, local_world_size): (Named, Named),
    ) -> Result<Self> {
        check_below(rank, world_size)?;
        check_below(local_rank, local_world_size)?;
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

fn check_below((name, rank): Named, (size_name, size): Named) -> Result<()> {
    if rank < size {
        return Ok(());
    }
    Err(Error::Environment(format!(
        "{name}: expected a number below {size_name}={size}, got {rank}"
    )))
}

/// The number in the first of `names` that is set; an error if none is, though `other` is.
fn required<'n>(vars: &Variables, names: &[&'n str], other: &str) -> Result<Named<'n>> {
    vars.first_number(names)?.ok_or_else(|| {
        Error::Environment(format!(
            "{} is not set, but {other} is\n\
             hint: start the program by a launcher (candle-train launch, torchrun, mpirun, srun), which sets them all, \
             or unset {other} for a run of one process",
            names.join(" or ")
        ))
    })
}

fn both<'n>(vars: &Variables, rank: &'n str, size: &'n str) -> Result<(Named<'n>, Named<'n>)> {
    let rank_value = required(vars, &[rank], size)?;
    Ok((rank_value, required(vars, &[size], rank)?))
}

/// Rank and number of ranks on this host. Both may be missing in a run of one rank only.
fn locals<'n>(
    vars: &Variables,
    (size_name, size): Named,
    rank: &[&'n str],
    local_size: &[&'n str],
) -> Result<(Named<'n>, Named<'n>)> {
    if size == 1 && !vars.is_set(rank[0]) && !vars.is_set(local_size[0]) {
        return Ok(((rank[0], 0), (local_size[0], 1)));
    }
    let of_size = format!("{size_name}={size}");
    let rank = required(vars, rank, &of_size)?;
    Ok((rank, required(vars, local_size, &of_size)?))
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
