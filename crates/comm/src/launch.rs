//! Starting ranks.

mod cannot_start;
mod mailboxes;
#[cfg(any(feature = "mpi", feature = "nccl"))]
mod meeting;
#[cfg(any(feature = "mpi", feature = "nccl"))]
mod process;
pub(crate) mod run_config;

use std::sync::Arc;
use std::thread::{Builder, scope};

use candle_core::{Device, Result};
use candle_launch::THREADS_HINT;

use crate::cores::{catch_panic, keep_candle_from_threads, num_cores, pool_of_rank};
use crate::error::argument;
use crate::local::{LocalCommunicator, World};
use crate::{Backend, LocalConfig, ProcessGroup, RunConfig};

pub use cannot_start::cannot_start;
#[cfg(feature = "mpi")]
pub(crate) use cannot_start::words_of_failed;
pub use mailboxes::mailboxes;

#[cfg(feature = "mpi")]
pub use crate::mpi::mpi;
#[cfg(feature = "nccl")]
pub use crate::nccl::nccl;

/// Runs `run` on the ranks of this process, and returns what they return in rank order: on all ranks, as threads, with the
/// backend `local`; on the one rank that this process is with the others.
///
/// Ranks that are processes meet first (see [`Control`](candle_launch::Control)): those that differ in
/// [`RunConfig::fingerprint`] are refused. From then on, when a rank dies, fails or hangs, all others end with a message that
/// names it, its last operation and its training step.
///
/// # Errors
/// Those of [`threads_with`], and whatever keeps the ranks from meeting.
pub fn run<T: Send>(
    config: &RunConfig,
    run: impl Fn(ProcessGroup) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    config.check()?;
    match config.backend {
        Backend::Local => {
            let mesh = LocalConfig::for_mesh(&config.degrees)?;
            let local = LocalConfig {
                devices: config.devices.clone(),
                deadline: config.deadline,
                abort_after: config.abort_after,
                threads_per_rank: config.threads_per_rank.or(mesh.threads_per_rank),
                ..mesh
            };
            threads_with(local, run)
        }
        #[cfg(feature = "mpi")]
        Backend::Mpi => process::mpi(config, run).map(|value| vec![value]),
        #[cfg(feature = "nccl")]
        Backend::Nccl => process::nccl(config, run).map(|value| vec![value]),
        #[cfg(not(all(feature = "mpi", feature = "nccl")))]
        _ => Err(config.not_built()),
    }
}

/// Runs `run` on `world_size` ranks, each a thread of this process with the CPU as its device, and returns what they
/// return, in rank order. As [`threads_with`] with the defaults of [`LocalConfig`].
///
/// # Errors
/// As [`threads_with`].
pub fn threads<T: Send>(
    world_size: usize,
    run: impl Fn(ProcessGroup) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    threads_with(LocalConfig::new(world_size), run)
}

/// Runs `run` on threads named `rank-0`, `rank-1`, .. and returns what they return, in rank order, when all of them have ended. If
/// one has failed and others have not ended a second later, a line on standard error says so. One that still computes after
/// [`LocalConfig::abort_after`] cannot be stopped: the process ends, with a message that has the failure and the ranks that did not
/// end.
///
/// A rank's tensors live on its device, [`ProcessGroup::device`]; with GPUs, operations return when their work is enqueued.
///
/// Each rank runs inside a rayon pool of its own, so that ranks do not queue behind each other and parallel iterators cost
/// a rank with one thread nothing. A rank must not communicate from inside a rayon job that it starts.
///
/// With several ranks, the first call in a process that still has one thread switches off candle's own pool for elementwise
/// operations, for the rest of the process: ranks would queue for it. `CANDLE_NUM_THREADS` decides otherwise.
///
/// # Errors
/// Devices that ranks cannot have. If ranks fail: the error of the first one that failed by itself, as `rank N failed: ..`. A panic counts as a failure
/// with the panic's message. The others, which notice within milliseconds, are not reported.
pub fn threads_with<T: Send>(
    config: LocalConfig,
    run: impl Fn(ProcessGroup) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    if config.world_size == 0 {
        return Err(argument("a run needs at least one rank, got world_size 0"));
    }
    if config.world_size > 1 && config.devices.iter().all(Device::is_cpu) {
        keep_candle_from_threads();
    }
    let (world_size, given) = (config.world_size, config.threads_per_rank);
    let threads_per_rank = given.unwrap_or(num_cores() / world_size);
    let world = World::new(config)?;
    // Tensors that ranks return or leave behind may be freed on this thread, which takes a current context.
    world.make_current(0)?;
    let results: Vec<Option<T>> = scope(|scope| {
        let mut handles = Vec::new();
        for rank in 0..world_size {
            let (thread_world, run) = (world.clone(), &run);
            let pool = pool_of_rank(rank, threads_per_rank, world.device(rank));
            let spawned = pool.map_err(std::io::Error::other).and_then(|pool| {
                let rank_main = move || pool.install(|| run_rank(&thread_world, rank, run));
                Builder::new().spawn_scoped(scope, rank_main)
            });
            match spawned {
                Ok(handle) => handles.push(handle),
                Err(error) => {
                    let message =
                        format!("its threads could not be started: {error}\n{THREADS_HINT}");
                    world.fail(rank, &argument(message));
                    break;
                }
            }
        }
        world.wait_for_ends(handles.len());
        handles
            .into_iter()
            .map(|handle| handle.join().ok().flatten())
            .collect()
    });
    if let Some(error) = world.take_failure() {
        return Err(error.into());
    }
    let num_undelivered = world.num_undelivered();
    if num_undelivered > 0 {
        tracing::warn!("{num_undelivered} messages were sent to ranks that never received them");
    }
    let results: Option<Vec<T>> = results.into_iter().collect();
    results.ok_or_else(|| candle_core::Error::msg("a rank ended without a result"))
}

/// Runs one rank and tells the others how it ended.
fn run_rank<T>(
    world: &Arc<World>,
    rank: usize,
    run: impl Fn(ProcessGroup) -> Result<T> + Sync,
) -> Option<T> {
    let group = ProcessGroup::new(Box::new(LocalCommunicator::new(world.clone(), rank)));
    let result = catch_panic(|| {
        world.make_current(rank)?;
        run(group)
    });
    match &result {
        Ok(_) => world.leave(rank),
        Err(error) => world.fail(rank, error),
    }
    result.ok()
}
