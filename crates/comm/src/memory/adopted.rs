//! Memory that one thread allocates and another one frees: what operations between ranks that are threads give.

use std::cell::Cell;
use std::sync::atomic::AtomicI64;

use candle_core::{DType, Device, Tensor};

/// Smaller tensors are not counted.
pub const MIN_ADOPTED_BYTES: usize = 4096;

thread_local! {
    static ADOPTED: Cell<i64> = const { Cell::new(0) };
    static OF_RANK: Cell<Option<&'static AtomicI64>> = const { Cell::new(None) };
}

/// Where a program's allocator may add up what the threads of the calling rank have allocated and not freed: what one of them allocates
/// another one frees. `None` on a thread of no rank. It allocates nothing.
pub fn allocated_of_rank() -> Option<&'static AtomicI64> {
    OF_RANK.get()
}

/// Has the calling thread allocate for a rank from now on: for a thread that works for the rank, which [`allocated_of_rank`] knows.
pub fn allocate_for(rank: &'static AtomicI64) {
    OF_RANK.set(Some(rank));
}

/// Bytes of the tensors that other threads have allocated for the calling one, which frees them, or will when their operation
/// is over, less those that it has allocated for others; tensors below [`MIN_ADOPTED_BYTES`] are left out.
///
/// The rank that comes last to a collective of ranks that are threads, or a thread in the background, allocates the results of all,
/// and a sender the message. What an allocator counts in [`allocated_of_rank`] is right for a rank with this added to it.
pub fn adopted_bytes() -> i64 {
    ADOPTED.get()
}

/// Bytes that the thread which makes this has adopted, until a thread drops it.
pub(crate) struct Adopted(i64);

impl Adopted {
    /// Counts a result that another thread is to allocate for this one, until it has come, or will not.
    pub fn expected(len: usize, dtype: DType, device: &Device) -> Self {
        Self::count(num_bytes(len, dtype, device))
    }

    fn count(num_bytes: i64) -> Self {
        ADOPTED.set(ADOPTED.get() + num_bytes);
        Self(num_bytes)
    }
}

impl Drop for Adopted {
    fn drop(&mut self) {
        ADOPTED.set(ADOPTED.get() - self.0);
    }
}

/// A tensor that the thread which makes this has allocated for the one which takes it out, or drops it.
pub(crate) struct GivenAway {
    pub xs: Tensor,
    _bytes: Adopted,
}

impl GivenAway {
    pub fn new(xs: Tensor) -> Self {
        let num_bytes = num_bytes(xs.elem_count(), xs.dtype(), xs.device());
        let _bytes = Adopted::count(-num_bytes);
        Self { xs, _bytes }
    }
}

fn num_bytes(len: usize, dtype: DType, device: &Device) -> i64 {
    match len * dtype.size_in_bytes() {
        bytes if bytes >= MIN_ADOPTED_BYTES && device.is_cpu() => bytes as i64,
        _ => 0,
    }
}
