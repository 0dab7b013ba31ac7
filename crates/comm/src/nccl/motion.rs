//! NCCL's operations on memory of a GPU.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use cudarc::driver::CudaStream;
use cudarc::nccl::sys;

pub(super) use cudarc::nccl::sys::{ncclDataType_t as DataType, ncclRedOp_t as RedOp};

use super::sys::{Handle, accepted};
use crate::Error;

type Result<T> = std::result::Result<T, Error>;

/// What a rank of a group does with its memory on the GPU: addresses, and how many values.
#[derive(Clone, Copy)]
pub(super) struct Memory {
    pub address: u64,
    pub len: usize,
    pub data_type: DataType,
}

impl Memory {
    fn read(&self) -> *const c_void {
        self.address as *const c_void
    }

    fn written(&self) -> *mut c_void {
        self.address as *mut c_void
    }
}

/// Calls `run`, whose operations are under way together.
pub(super) fn grouped(run: impl FnOnce() -> Result<()>) -> Result<()> {
    // SAFETY: it has no arguments. The group is ended below, whatever happens.
    accepted("a group of calls", unsafe { sys::ncclGroupStart() })?;
    let called = run();
    // SAFETY: a group was started on this thread.
    let ended = accepted("a group of calls", unsafe { sys::ncclGroupEnd() });
    called.and(ended)
}

/// An operation on memory of a GPU.
#[derive(Clone, Copy)]
pub(super) enum Motion {
    AllReduce(RedOp, Memory, Memory),
    ReduceScatter(RedOp, Memory, Memory),
    AllGather(Memory, Memory),
    Broadcast(c_int, Memory, Memory),
    Send(c_int, Memory),
    Recv(c_int, Memory),
}

impl Motion {
    /// Puts it on `stream`; on the stream it may be only when the group has settled.
    ///
    /// # Safety
    /// The addresses are of the group's GPU, and hold values for all the operation reads and writes, which nobody frees, or
    /// writes to, until the stream is complete.
    pub unsafe fn enqueue(self, comm: Handle, stream: &CudaStream) -> Result<()> {
        let stream = stream.cu_stream().cast();
        // SAFETY: as the caller promises; the handle is alive, and the stream is of its GPU.
        let (what, code) = unsafe {
            match self {
                Self::AllReduce(op, from, to) => (
                    "all_reduce",
                    sys::ncclAllReduce(
                        from.read(),
                        to.written(),
                        from.len,
                        from.data_type,
                        op,
                        comm.0,
                        stream,
                    ),
                ),
                Self::ReduceScatter(op, from, to) => (
                    "reduce_scatter",
                    sys::ncclReduceScatter(
                        from.read(),
                        to.written(),
                        to.len,
                        from.data_type,
                        op,
                        comm.0,
                        stream,
                    ),
                ),
                Self::AllGather(from, to) => (
                    "all_gather",
                    sys::ncclAllGather(
                        from.read(),
                        to.written(),
                        from.len,
                        from.data_type,
                        comm.0,
                        stream,
                    ),
                ),
                Self::Broadcast(root, from, to) => (
                    "broadcast",
                    sys::ncclBroadcast(
                        from.read(),
                        to.written(),
                        from.len,
                        from.data_type,
                        root,
                        comm.0,
                        stream,
                    ),
                ),
                Self::Send(dst, from) => (
                    "a send",
                    sys::ncclSend(from.read(), from.len, from.data_type, dst, comm.0, stream),
                ),
                Self::Recv(src, to) => (
                    "a receive",
                    sys::ncclRecv(to.written(), to.len, to.data_type, src, comm.0, stream),
                ),
            }
        };
        accepted(what, code)
    }
}
