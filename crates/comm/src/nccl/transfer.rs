//! NCCL's operations on tensors of a GPU.
#![allow(unsafe_code)]

use std::ffi::c_void;

use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, DeviceRepr};
use candle_core::{CudaStorage, DType, Result, Storage, Tensor, bail};
use cudarc::nccl::sys::{self, ncclDataType_t as DataType, ncclRedOp_t as RedOp};

use super::sys::{Handle, accepted, as_int};
use crate::reduction::element::with_element;
use crate::{Error, ReduceOp};

/// What NCCL is asked for. Ranks are those of the group.
#[derive(Clone, Copy)]
pub(super) enum Motion {
    AllReduce(ReduceOp),
    ReduceScatter(ReduceOp),
    Reduce(ReduceOp, usize),
    AllGather,
    Broadcast(usize),
    Send(usize),
    Recv(usize),
}

/// A step of an operation, between contiguous tensors of the group's GPU that have elements. A send and a receive have one.
pub(super) struct NcclTransfer {
    motion: Motion,
    from: Memory,
    to: Memory,
}

/// A tensor's place on the GPU, and how many values are there.
struct Memory {
    tensor: Tensor,
    address: u64,
    len: usize,
    data_type: DataType,
}

impl NcclTransfer {
    /// A step between tensors that belong to the stream `compute`.
    pub fn new(motion: Motion, from: &Tensor, to: &Tensor, compute: &CudaStream) -> Result<Self> {
        Ok(Self {
            motion,
            from: memory_of(from, compute)?,
            to: memory_of(to, compute)?,
        })
    }

    /// The tensors that must be kept until it is complete.
    pub fn tensors(&self) -> [Tensor; 2] {
        [self.from.tensor.clone(), self.to.tensor.clone()]
    }

    /// Puts it on `stream`; on the stream it may be only when the group has settled.
    ///
    /// # Safety
    /// As for [`enqueue`].
    unsafe fn enqueue(&self, comm: Handle, stream: &CudaStream) -> std::result::Result<(), Error> {
        let (stream, comm) = (stream.cu_stream().cast(), comm.0);
        let (from, to) = (
            self.from.address as *const c_void,
            self.to.address as *mut c_void,
        );
        let (from_len, to_len, data_type) = (self.from.len, self.to.len, self.from.data_type);
        // SAFETY: as the caller promises; the handle is alive, and the stream is of its GPU.
        let (what, code) = unsafe {
            match self.motion {
                Motion::AllReduce(op) => {
                    let op = red_op(op);
                    let code = sys::ncclAllReduce(from, to, from_len, data_type, op, comm, stream);
                    ("all_reduce", code)
                }
                Motion::ReduceScatter(op) => {
                    let op = red_op(op);
                    let code =
                        sys::ncclReduceScatter(from, to, to_len, data_type, op, comm, stream);
                    ("reduce_scatter", code)
                }
                Motion::Reduce(op, root) => {
                    let (op, root) = (red_op(op), as_int(root)?);
                    let code =
                        sys::ncclReduce(from, to, from_len, data_type, op, root, comm, stream);
                    ("reduce", code)
                }
                Motion::AllGather => {
                    let code = sys::ncclAllGather(from, to, from_len, data_type, comm, stream);
                    ("all_gather", code)
                }
                Motion::Broadcast(root) => {
                    let root = as_int(root)?;
                    let code =
                        sys::ncclBroadcast(from, to, from_len, data_type, root, comm, stream);
                    ("broadcast", code)
                }
                Motion::Send(dst) => {
                    let code = sys::ncclSend(from, from_len, data_type, as_int(dst)?, comm, stream);
                    ("a send", code)
                }
                Motion::Recv(src) => {
                    let code = sys::ncclRecv(to, to_len, data_type, as_int(src)?, comm, stream);
                    ("a receive", code)
                }
            }
        };
        accepted(what, code)
    }
}

/// Puts steps on `stream`, all under way together.
///
/// # Safety
/// The addresses are of the group's GPU, and hold values for all the operations read and write, which nobody frees, or
/// writes to, until the stream is complete.
pub(super) unsafe fn enqueue(
    steps: &[NcclTransfer],
    comm: Handle,
    stream: &CudaStream,
) -> std::result::Result<(), Error> {
    // SAFETY: it has no arguments. The group is ended below, whatever happens.
    accepted("a group of calls", unsafe { sys::ncclGroupStart() })?;
    // SAFETY: as the caller promises.
    let called = (steps.iter()).try_for_each(|step| unsafe { step.enqueue(comm, stream) });
    // SAFETY: a group was started on this thread.
    let ended = accepted("a group of calls", unsafe { sys::ncclGroupEnd() });
    called.and(ended)
}

fn red_op(op: ReduceOp) -> RedOp {
    match op {
        ReduceOp::Sum | ReduceOp::Avg => RedOp::ncclSum,
        ReduceOp::Prod => RedOp::ncclProd,
        ReduceOp::Max => RedOp::ncclMax,
        ReduceOp::Min => RedOp::ncclMin,
    }
}

fn memory_of(xs: &Tensor, compute: &CudaStream) -> Result<Memory> {
    let (storage, layout) = xs.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        bail!(
            "NCCL moves tensors on GPUs, got one on {:?}",
            xs.device().location()
        )
    };
    let (start, len) = (layout.start_offset(), layout.shape().elem_count());
    let address = with_element!(xs.dtype(), address_of(storage, start, len, compute))?;
    let (data_type, len) = match xs.dtype() {
        DType::F32 => (DataType::ncclFloat32, len),
        DType::F64 => (DataType::ncclFloat64, len),
        DType::BF16 => (DataType::ncclBfloat16, len),
        DType::F16 => (DataType::ncclFloat16, len),
        DType::U32 => (DataType::ncclUint32, len),
        DType::I32 => (DataType::ncclInt32, len),
        DType::I64 => (DataType::ncclInt64, len),
        // As bytes. NCCL has no i16, which is never reduced on a GPU.
        dtype => (DataType::ncclUint8, len * dtype.size_in_bytes()),
    };
    Ok(Memory {
        tensor: xs.clone(),
        address,
        len,
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
