//! Memory that one thread allocates and another one frees: what operations between ranks that are threads give.

use std::cell::Cell;

use candle_core::{DType, Device, Tensor};

/// Smaller tensors are not counted.
pub const MIN_ADOPTED_BYTES: usize = 4096;

thread_local! {
    static ADOPTED: Cell<i64> = const { Cell::new(0) };
}

/// Bytes of the tensors that other threads have allocated for the calling one, which frees them, or will when their operation
/// is over, less those that it has allocated for others; tensors below [`MIN_ADOPTED_BYTES`] are left out.
///
/// The rank that comes last to a collective of ranks that are threads, or a thread in the background, allocates the results of all,
/// and a sender the message. What an allocator counts by thread is right for a rank with this added to it.
pub fn adopted_bytes() -> i64 {
    ADOPTED.get()
}

/// Counts a tensor that another thread allocates for this one.
pub(crate) fn adopt(len: usize, dtype: DType, device: &Device) {
    ADOPTED.set(ADOPTED.get() + num_bytes(len, dtype, device));
}

/// Counts a tensor that this thread allocates for another one, or that it does not get after all.
pub(crate) fn give_away(len: usize, dtype: DType, device: &Device) {
    ADOPTED.set(ADOPTED.get() - num_bytes(len, dtype, device));
}

/// A tensor that the thread which makes this allocates for the one which drops it.
#[derive(Debug)]
pub(crate) struct GivenAway(Tensor);

impl GivenAway {
    pub(crate) fn new(xs: Tensor) -> Self {
        give_away(xs.elem_count(), xs.dtype(), xs.device());
        Self(xs)
    }

    pub(crate) fn tensor(&self) -> &Tensor {
        &self.0
    }
}

impl Drop for GivenAway {
    fn drop(&mut self) {
        adopt(self.0.elem_count(), self.0.dtype(), self.0.device());
    }
}

fn num_bytes(len: usize, dtype: DType, device: &Device) -> i64 {
    match len * dtype.size_in_bytes() {
        bytes if bytes >= MIN_ADOPTED_BYTES && device.is_cpu() => bytes as i64,
        _ => 0,
    }
}
