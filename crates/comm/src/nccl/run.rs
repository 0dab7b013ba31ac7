//! One rank from joining the others to the end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::result::stream::get_priority_range;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaStream};
use candle_core::{Device, Result};

use super::group::NcclGroup;
use super::rank_run::RankRun;
use super::session::Session;
use super::{NcclCommunicator, NcclConfig, sys};
use crate::cores::{num_cores, panic_message, pool_of_rank};
use crate::error::argument;
use crate::memory::device::{self, has_a_stream};
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
    device::make_current(&config.device)?;
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
                argument(format!("rank {rank} panicked: {message}"))
            }
        };
        let first = session.run.failure();
        session
            .run
            .fail(Error::Backend(format!("rank {rank} has ended")));
        // An error may only be what came after the failure.
        Err(first.map_or(failed, candle_core::Error::from))
    })
}

impl NcclCommunicator {
    /// Joins the group of all ranks, and returns when all are there.
    ///
    /// # Errors
    /// NCCL cannot be loaded, is too old or refuses the ranks (two on one GPU); the device is no GPU with a stream of its own;
    /// ranks are missing at the deadline.
    pub fn join(config: &NcclConfig) -> Result<Self> {
        let (rank, world_size) = (config.rank, config.world_size);
        if rank >= world_size {
            return Err(argument(format!(
                "rank {rank} is not a rank of a world of world_size {world_size}"
            )));
        }
        let compute = stream_of(&config.device)?;
        sys::check_version()?;
        if rank == 0
            && world_size > 1
            && std::env::var("CUDA_MODULE_LOADING").as_deref() != Ok("EAGER")
        {
            tracing::info!(
                "CUDA_MODULE_LOADING=EAGER is safer: kernels of cuBLAS and cuDNN load at their first use, which may wait for an operation of NCCL that waits for another rank"
            );
        }
        let made = match rank {
            0 => sys::unique_id()?.to_vec(),
            _ => Vec::new(),
        };
        let got = (config.exchange)(&made)?;
        let Ok(id) = got.as_slice().try_into() else {
            let message = format!(
                "NCCL's unique id has 128 bytes, rank {rank} got {} from rank 0",
                got.len()
            );
            return Err(Error::Backend(message).into());
        };
        compute.context().bind_to_thread().w()?;
        let session = Arc::new(Session::start(rank, config.deadline, compute)?);
        let stream = new_stream(&session.run)?;
        let group = NcclGroup::world((rank, world_size), id, stream, &session.run);
        let group = group.and_then(|group| session.run.add(group));
        let group = group.map_err(|error| {
            let device = device::name(&config.device);
            // It does not say which usage is invalid.
            let hint = match error.to_string().contains("invalid usage") {
                true => {
                    "\nhint: NCCL refuses ranks that share a GPU: give each rank of a host a GPU of its own; NCCL_DEBUG=WARN has NCCL \
                     say more"
                }
                false => "",
            };
            Error::Backend(format!(
                "rank {rank} on {device} cannot join the other ranks: {error}{hint}"
            ))
        })?;
        Ok(Self {
            session,
            group,
            device: config.device.clone(),
            half_sums: config.half_sums,
        })
    }
}

/// The stream on which a rank computes.
fn stream_of(device: &Device) -> Result<Arc<CudaStream>> {
    match device {
        Device::Cuda(cuda) if has_a_stream(cuda) => Ok(cuda.cuda_stream()),
        Device::Cuda(_) => Err(argument(
            "the backend nccl needs a GPU with one stream, got one opened with a stream for each thread\n\
             hint: open it by `Device::new_cuda_with_stream`",
        )),
        _ => Err(argument(
            "the backend nccl runs on GPUs, got a rank on the CPU\nhint: use the backend mpi, or local",
        )),
    }
}

/// A stream for a group: those of several groups run at once. Its kernels are few and other ranks wait for them, so they come
/// before what computes when a part of the GPU is free.
pub(super) fn new_stream(run: &RankRun) -> Result<Arc<CudaStream>> {
    let context = run.compute.context();
    context.bind_to_thread().w()?;
    let (_, first) = get_priority_range().w()?;
    context.new_stream_with_priority(first).w()
}
