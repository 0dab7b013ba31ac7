//! The tensors of weights that one launch of AdamW updates, as the kernel takes them: by value, so that nothing has to be put
//! on the GPU before.

use super::pointer::Argument;
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::cuda_backend::cudarc::driver::sys::CUdeviceptr;

/// `AdamWSlot` of `kernels/adamw.cu`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct RawSlot {
    pub(crate) weights: CUdeviceptr,
    /// Place of the first weight in the flat buffers.
    pub(crate) start: i64,
    pub(crate) len: i64,
    pub(crate) decay_factor: f32,
    pub(crate) unused: i32,
}

/// `AdamWSlots` of `kernels/adamw.cu`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct AdamWSlots {
    pub(crate) slots: [RawSlot; Self::MAX],
}

impl AdamWSlots {
    /// Tensors of one launch: `ADAMW_SLOTS` of `kernels/adamw.cu`.
    pub(crate) const MAX: usize = 16;
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
