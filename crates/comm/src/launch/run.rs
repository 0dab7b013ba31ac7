//! One program for threads, MPI and NCCL.

use candle_core::Result;

use crate::{Backend, LocalConfig, ProcessGroup, RunConfig, launch};

/// Runs `run` on the ranks of this process, and returns what they return in rank order: on all ranks, as threads, with the
/// backend `local`; on the one rank that this process is with the others.
///
/// Ranks that are processes meet first (see [`Control`](candle_launch::Control)): those that differ in
/// [`RunConfig::fingerprint`] are refused. From then on, when a rank dies, fails or hangs, all others end with a message that
/// names it, its last operation and its training step.
///
/// # Errors
/// Those of [`threads_with`](launch::threads_with), and whatever keeps the ranks from meeting.
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
                threads_per_rank: config.threads_per_rank.or(mesh.threads_per_rank),
                ..mesh
            };
            launch::threads_with(local, run)
        }
        #[cfg(feature = "mpi")]
        Backend::Mpi => super::process::mpi(config, run).map(|value| vec![value]),
        #[cfg(feature = "nccl")]
        Backend::Nccl => super::process::nccl(config, run).map(|value| vec![value]),
        #[cfg(not(all(feature = "mpi", feature = "nccl")))]
        _ => Err(config.not_built()),
    }
}
