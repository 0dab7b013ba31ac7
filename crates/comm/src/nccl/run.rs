//! One rank from joining the others to the end.

use std::panic::{AssertUnwindSafe, catch_unwind};

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::CudaContext;

use super::{NcclCommunicator, NcclConfig};
use crate::cores::{num_cores, panic_message, pool_of_rank};
use crate::device::make_current;
use crate::{Error, ProcessGroup};

/// Runs `run` as one rank of a run over NCCL, on the GPU that the config names, and returns what it returns. All ranks call it,
/// each in a process or a thread of its own.
///
/// The rank runs inside a rayon pool of its own, on a thread named `rank-N`. Another thread, `nccl-N`, ends what lasts longer
/// than the deadline. When `run` has returned, operations are completed and groups freed; groups that are kept cannot be used.
///
/// # Errors
/// Those of [`NcclCommunicator::join`]; the first failure of the run on this rank, or else that of `run`, whose panic counts as
/// one. NCCL does not tell the other ranks, whose operations then last until their deadline: a control plane does, see
/// [`launch::run`](crate::launch::run).
pub fn nccl<T: Send>(
    config: NcclConfig,
    run: impl FnOnce(ProcessGroup) -> Result<T> + Send,
) -> Result<T> {
    let rank = config.rank;
    let num_gpus = CudaContext::device_count().unwrap_or(1).max(1);
    let threads = config
        .threads_per_rank
        .unwrap_or(num_cores() / num_gpus as usize);
    let pool = pool_of_rank(rank, threads, &config.device).map_err(candle_core::Error::wrap)?;
    // What the rank returns may be freed on this thread, which takes a current context.
    make_current(&config.device)?;
    pool.install(|| {
        let world = NcclCommunicator::join(&config)?;
        let session = world.session.clone();
        // What a panicking rank leaves behind is never looked at.
        let ran = catch_unwind(AssertUnwindSafe(|| run(ProcessGroup::new(Box::new(world)))));
        let failed = match ran {
            Ok(Ok(value)) => {
                session.close()?;
                return Ok(value);
            }
            Ok(Err(error)) => error,
            Err(panic) => {
                let message = panic_message(&*panic);
                Error::Argument(format!("rank {rank} panicked: {message}")).into()
            }
        };
        let first = session.state.failure();
        session.fail(Error::Backend(format!("rank {rank} has ended")));
        // An error may only be what came after the failure.
        Err(first.map_or(failed, candle_core::Error::from))
    })
}
