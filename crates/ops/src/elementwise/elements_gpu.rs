//! Converting and adding on the GPU, value by value.

#![allow(unsafe_code)]

use crate::cpu::half_precision::by_half_precision;
use crate::cuda::element::{Element, by_dtype};
use crate::cuda::gpu::Gpu;
use crate::cuda::launch;
use crate::cuda::pointer::Out;
use crate::cuda::values::Fresh;
use crate::host::values::detached;
use candle_core::{DType, Result, Shape, Tensor};

/// `dst`, f32, `= src` or, if `add`, `+= src`, f32, bf16 or f16, of as many values.
pub(crate) fn add_into(dst: &Tensor, add: bool, src: &Tensor) -> Result<()> {
    let gpu = Gpu::of("add_into", dst)?;
    let (len, src) = (src.elem_count(), detached(src)?);
    let (at, count) = (gpu.elements(len)?, len as i64);
    by_dtype!(gpu.op(), "values", src, T => {
        let values = gpu.read::<T>("values", &src)?;
        // SAFETY: both have len values.
        gpu.write::<f32>("dst", dst, |dst| unsafe {
            match (add, src.dtype()) {
                (true, _) => launch::add_into(&at, dst, values.get::<T>(), count),
                (false, DType::F32) => gpu.copy(dst, values.get(), len),
                (false, _) => launch::widen(&at, dst, values.get::<T>(), count),
            }
        })
    })
}

/// `dst`, bf16 or f16, `= src`, f32, of as many values, rounded to the nearest, ties to even.
pub(crate) fn round_into(dst: &Tensor, src: &Tensor) -> Result<()> {
    let gpu = Gpu::of("round_into", dst)?;
    let (len, src) = (src.elem_count(), detached(src)?);
    let src = gpu.read::<f32>("values", &src)?;
    by_half_precision!(gpu.op(), "dst", dst, T => gpu.write::<T>("dst", dst, |dst| {
        // SAFETY: both have len values.
        unsafe { launch::round::<T>(&gpu.elements(len)?, dst, src.get(), len as i64) }
    }))
}

/// Sets the `len` values of `dst` to zero.
///
/// # Safety
/// It must have as many.
pub(crate) unsafe fn zero<T: Element>(gpu: &Gpu, dst: Out<T>, len: usize) -> Result<()> {
    if len == 0 {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    unsafe { launch::fill(&gpu.elements(len)?, dst, 0.0, len as i64) }
}

/// The values of `src`, as many as `shape` has, as a tensor of the type of `like`.
pub(crate) fn rounded(
    gpu: &Gpu,
    src: Fresh<f32>,
    like: &Tensor,
    shape: impl Into<Shape>,
) -> Result<Tensor> {
    let shape = shape.into();
    let len = shape.elem_count();
    if like.dtype() == DType::F32 {
        return Ok(src.into_tensor(shape));
    }
    by_half_precision!(gpu.op(), "the gradient", like, T => {
        let dst = gpu.alloc::<T>(len)?;
        if len > 0 {
            // SAFETY: both have len values.
            unsafe { launch::round(&gpu.elements(len)?, dst.out(), src.out().read(), len as i64) }?;
        }
        Ok(dst.into_tensor(shape))
    })
}
