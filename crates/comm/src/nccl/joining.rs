//! How a rank joins the group of all ranks.

use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::cuda_backend::cudarc::driver::result::stream::get_priority_range;
use candle_core::{Device, Result};

use super::group::Group;
use super::session::Session;
use super::{NcclCommunicator, NcclConfig, sys};
use crate::Error;
use crate::device::{self, has_a_stream};

impl NcclCommunicator {
    /// Joins the group of all ranks, and returns when all are there.
    ///
    /// # Errors
    /// NCCL cannot be loaded, is too old or refuses the ranks (two on one GPU); the device is no GPU with a stream of its own;
    /// ranks are missing at the deadline.
    pub fn join(config: &NcclConfig) -> Result<Self> {
        let (rank, world_size) = (config.rank, config.world_size);
        if rank >= world_size {
            let message =
                format!("rank {rank} is not a rank of a world of world_size {world_size}");
            return Err(Error::Argument(message).into());
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
        let session = Session::start(rank, config.deadline, compute)?;
        let stream = new_stream(&session)?;
        let group = Group::world((rank, world_size), id, stream, &session.state);
        let group = group.and_then(|group| session.add(group));
        let group = group.map_err(|error| {
            let device = device::name(&config.device);
            Error::Backend(format!(
                "rank {rank} on {device} cannot join the other ranks: {error}"
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
        Device::Cuda(_) => Err(Error::Argument(
            "the backend nccl needs a GPU with one stream, got one opened with a stream for each thread\n\
             hint: open it by `Device::new_cuda_with_stream`"
                .into(),
        )
        .into()),
        _ => Err(Error::Argument(
            "the backend nccl runs on GPUs, got a rank on the CPU\nhint: use the backend mpi, or local".into(),
        )
        .into()),
    }
}

/// A stream for a group: those of several groups run at once. Its kernels are few and other ranks wait for them, so they come
/// before what computes when a part of the GPU is free.
pub(super) fn new_stream(session: &Session) -> Result<Arc<CudaStream>> {
    let context = session.compute.context();
    context.bind_to_thread().w()?;
    let (_, first) = get_priority_range().w()?;
    context.new_stream_with_priority(first).w()
}
