//! The tensors of weights that one launch of AdamW updates, as the kernel takes them: by value, so that nothing has to be put
//! on the GPU before.

use super::pointer::{Argument, Out};
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::cuda_backend::cudarc::driver::sys::CUdeviceptr;

/// `AdamWSlot` of `kernels/adamw.cu`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct RawSlot {
    weights: CUdeviceptr,
    start: i64,
    len: i64,
    decay_factor: f32,
    unused: i32,
}

/// `AdamWSlots` of `kernels/adamw.cu`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct AdamWSlots {
    slots: [RawSlot; Self::MAX],
}

impl AdamWSlots {
    /// Tensors of one launch: `ADAMW_SLOTS` of `kernels/adamw.cu`.
    pub(crate) const MAX: usize = 16;

    /// Sets slot `index`, below [`Self::MAX`]: weights, the place of the first one in the flat buffers, how many, and their
    /// factor.
    pub(crate) fn set<T>(
        &mut self,
        index: usize,
        weights: Out<T>,
        [start, len]: [usize; 2],
        decay_factor: f32,
    ) {
        self.slots[index] = RawSlot {
            weights: weights.address(),
            start: start as i64,
            len: len as i64,
            decay_factor,
            unused: 0,
        };
    }
}

// SAFETY: plain values, laid out as the kernel's struct is; the tests of AdamW on a device would not find their weights
// otherwise.
#[allow(unsafe_code)]
unsafe impl DeviceRepr for AdamWSlots {}

impl Argument for AdamWSlots {
    type Raw = Self;

    fn raw(&self) -> Self {
        *self
    }
}
