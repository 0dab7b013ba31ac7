//! This process as one rank of a run: it meets the others, runs, and says how it ended.

use std::sync::Arc;

use candle_core::Result;
use candle_launch::Control;

use super::cannot_start::{known, meeting_begins, said_by_all};
#[cfg(feature = "nccl")]
use super::meeting::meet;
#[cfg(feature = "mpi")]
use super::meeting::meet_over;
use crate::{ProcessGroup, RunConfig, message_of};

/// Runs this rank over MPI, by which the ranks also learn where to meet if their launcher did not say it.
#[cfg(feature = "mpi")]
pub(super) fn mpi<T: Send>(
    config: &RunConfig,
    run: impl Fn(ProcessGroup) -> Result<T> + Sync,
) -> Result<T> {
    let mpi = crate::MpiConfig {
        deadline: config.deadline,
        threads_per_rank: config
            .threads_per_rank
            .or_else(|| threads_of_stages(config)),
        failure_exit_code: config.failure_exit_code.clone(),
        ..crate::MpiConfig::default()
    };
    meeting_begins();
    // What all ranks know when they meet ends none of them by MPI_Abort.
    super::mpi(mpi, |world| {
        let master = |master| config.control(master);
        Ok(match meet_over(&world, &config.env, master)? {
            Ok(control) => Ok(watched(&control, &world, config, &run)?),
            Err(cannot_start) => Err(known(cannot_start)),
        })
    })?
}

/// Runs this rank over NCCL, on its GPU.
#[cfg(feature = "nccl")]
pub(super) fn nccl<T: Send>(
    config: &RunConfig,
    run: impl Fn(ProcessGroup) -> Result<T> + Sync,
) -> Result<T> {
    meeting_begins();
    let control = meet(config).map_err(known)?;
    let exchange = {
        let control = control.clone();
        Arc::new(move |bytes: &[u8]| {
            let ids = control.gather("the unique id of NCCL", bytes);
            let ids = ids.map_err(candle_core::Error::wrap)?;
            Ok(ids.into_iter().next().unwrap_or_default())
        })
    };
    let device = config.devices.first().unwrap_or(&candle_core::Device::Cpu);
    let (rank, world_size) = (config.env.rank(), config.env.world_size());
    // Not by the number of GPUs: a launcher may show each process one of several.
    let share = crate::cores::num_cores() / config.env.local_world_size().max(1);
    let nccl = crate::NcclConfig {
        deadline: config.deadline,
        half_sums: config.half_sums,
        threads_per_rank: config.threads_per_rank.or(Some(share)),
        ..crate::NcclConfig::new(rank, world_size, device.clone(), exchange)
    };
    let outcome = super::nccl(nccl, |world| watched(&control, &world, config, &run));
    if let (Err(error), None) = (&outcome, control.failure()) {
        tell_failed(&control, error);
    }
    outcome
}

/// Threads per rank where a host has several stages of a pipeline: a stage that waits for another leaves its cores to it.
#[cfg(feature = "mpi")]
fn threads_of_stages(config: &RunConfig) -> Option<usize> {
    let (world_size, on_host) = (config.env.world_size(), config.env.local_world_size());
    let ranks_per_stage = (world_size / config.degrees.pp).max(1);
    let num_stages = on_host.div_ceil(ranks_per_stage);
    (num_stages > 1).then(|| (crate::cores::num_cores() * num_stages / on_host.max(1)).max(1))
}

/// Runs this rank under the eyes of the others.
fn watched<T>(
    control: &Arc<Control>,
    world: &ProcessGroup,
    config: &RunConfig,
    run: impl Fn(ProcessGroup) -> Result<T>,
) -> Result<T> {
    let world = world.watched(control, config.check_collectives)?;
    match run(world) {
        Ok(value) => {
            control.leave().map_err(candle_core::Error::wrap)?;
            Ok(value)
        }
        Err(error) => {
            tell_failed(control, &error);
            Err(error)
        }
    }
}

/// Tells the others that this rank failed, and notes who says it if all did.
fn tell_failed(control: &Control, error: &candle_core::Error) {
    let failure = control.fail(&message_of(error));
    if failure.is_some_and(|failure| failure.is_of_all()) {
        said_by_all();
    }
}
