//! What an operation moves: tensors of this rank, or parts of them.
#![allow(unsafe_code)]

use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, DeviceRepr};
use candle_core::{CudaStorage, DType, Device, Result, Shape, Storage, Tensor, bail};

use super::motion::{DataType, Memory, Motion, RedOp, grouped};
use super::sys::Handle;
use crate::element::{unsupported, with_element};
use crate::{Error, ReduceOp};

/// A step of an operation, between contiguous tensors of the group's GPU that have elements.
pub(super) enum Transfer {
    AllReduce(ReduceOp, Tensor, Tensor),
    ReduceScatter(ReduceOp, Tensor, Tensor),
    AllGather(Tensor, Tensor),
    Broadcast(usize, Tensor, Tensor),
    Send(usize, Tensor),
    Recv(usize, Tensor),
}

impl Transfer {
    /// What NCCL is asked for. `compute` is the stream that the tensors belong to.
    pub fn motion(&self, compute: &CudaStream) -> Result<Motion> {
        let memory = |xs| memory_of(xs, compute);
        Ok(match self {
            Self::AllReduce(op, xs, ys) => Motion::AllReduce(red_op(*op), memory(xs)?, memory(ys)?),
            Self::ReduceScatter(op, xs, ys) => {
                Motion::ReduceScatter(red_op(*op), memory(xs)?, memory(ys)?)
            }
            Self::AllGather(xs, ys) => Motion::AllGather(memory(xs)?, memory(ys)?),
            Self::Broadcast(root, xs, ys) => {
                Motion::Broadcast(number(*root)?, memory(xs)?, memory(ys)?)
            }
            Self::Send(dst, xs) => Motion::Send(number(*dst)?, memory(xs)?),
            Self::Recv(src, ys) => Motion::Recv(number(*src)?, memory(ys)?),
        })
    }

    /// The tensors, to be kept until the operation is complete.
    pub fn tensors(&self) -> Vec<Tensor> {
        match self {
            Self::AllReduce(_, xs, ys)
            | Self::ReduceScatter(_, xs, ys)
            | Self::AllGather(xs, ys)
            | Self::Broadcast(_, xs, ys) => vec![xs.clone(), ys.clone()],
            Self::Send(_, xs) | Self::Recv(_, xs) => vec![xs.clone()],
        }
    }
}

/// Puts motions on `stream`, all under way together.
///
/// # Safety
/// As for [`Motion::enqueue`].
pub(super) unsafe fn enqueue(
    motions: &[Motion],
    comm: Handle,
    stream: &CudaStream,
) -> std::result::Result<(), Error> {
    grouped(|| {
        motions.iter().try_for_each(|motion| {
            // SAFETY: as the caller promises.
            unsafe { motion.enqueue(comm, stream) }
        })
    })
}

/// Memory for a result, which an operation must write before anything reads it.
pub(super) fn unwritten(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    // SAFETY: every operation writes all elements of its results, and a result is given out only after the operation.
    unsafe { Tensor::empty(shape, dtype, device) }
}

/// A rank as NCCL counts it.
pub(super) fn number(rank: usize) -> Result<i32> {
    i32::try_from(rank).map_err(|_| Error::Argument(format!("NCCL has no rank {rank}")).into())
}

fn red_op(op: ReduceOp) -> RedOp {
    match op {
        ReduceOp::Sum => RedOp::ncclSum,
        ReduceOp::Max => RedOp::ncclMax,
    }
}

/// NCCL's type for elements of `dtype`, and how many of it an element is: i16, which NCCL has not, moves as bytes.
fn data_type(dtype: DType) -> Result<(DataType, usize)> {
    Ok(match dtype {
        DType::F32 => (DataType::ncclFloat32, 1),
        DType::F64 => (DataType::ncclFloat64, 1),
        DType::BF16 => (DataType::ncclBfloat16, 1),
        DType::F16 => (DataType::ncclFloat16, 1),
        DType::U8 => (DataType::ncclUint8, 1),
        DType::U32 => (DataType::ncclUint32, 1),
        DType::I16 => (DataType::ncclUint8, 2),
        DType::I32 => (DataType::ncclInt32, 1),
        DType::I64 => (DataType::ncclInt64, 1),
        dtype => return Err(unsupported(dtype)),
    })
}

fn memory_of(xs: &Tensor, compute: &CudaStream) -> Result<Memory> {
    let (storage, layout) = xs.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        bail!(
            "NCCL moves tensors on GPUs, got one on {:?}",
            xs.device().location()
        )
    };
    let (data_type, units) = data_type(xs.dtype())?;
    let (start, len) = (layout.start_offset(), layout.shape().elem_count());
    let address = with_element!(xs.dtype(), address_of(storage, start, len, compute))?;
    Ok(Memory {
        address,
        len: len * units,
        data_type,
    })
}

fn address_of<T: CudaDType + DeviceRepr>(
    storage: &CudaStorage,
    start: usize,
    len: usize,
    compute: &CudaStream,
) -> Result<u64> {
    let Some(values) = storage.as_cuda_slice::<T>()?.try_slice(start..start + len) else {
        bail!("NCCL: a tensor is shorter than its shape")
    };
    let (address, _recorded) = values.device_ptr(compute);
    Ok(address)
}
