//! Filling, converting and adding, value by value.

use super::launch;
use super::values::{Element, Gpu, by_dtype};
use candle_core::{DType, Result, Tensor, bail};
use half::bf16;

/// Sets every value of `dst` (f32 or bf16, contiguous) to `value`.
///
/// # Errors
/// When `dst` is not on CUDA, not contiguous or of another dtype.
pub fn fill(dst: &Tensor, value: f32) -> Result<()> {
    by_dtype!("fill", dst.dtype(), T => fill_as::<T>(dst, value))
}

fn fill_as<T: Element>(dst: &Tensor, value: f32) -> Result<()> {
    let gpu = Gpu::of("fill", dst)?;
    let len = dst.elem_count();
    gpu.write::<T>("dst", dst, |dst| {
        // SAFETY: dst has len values.
        unsafe { launch::fill(&gpu.elements(len)?, dst, value, len as i64) }
    })
}

/// Writes `src` to `dst` of the other dtype of f32 and bf16, rounded to nearest even; both contiguous and of as many values.
///
/// # Errors
/// When they differ in length, are of one dtype, or are not contiguous and on one GPU.
pub fn cast_into(dst: &Tensor, src: &Tensor) -> Result<()> {
    let op = "cast_into";
    let gpu = Gpu::of(op, dst)?;
    let len = same_len(op, dst, src)?;
    match (src.dtype(), dst.dtype()) {
        (DType::F32, DType::BF16) => {
            let src = gpu.read::<f32>("src", src)?;
            gpu.write::<bf16>("dst", dst, |dst| {
                // SAFETY: both have len values.
                unsafe { launch::cast_f32_to_bf16(&gpu.elements(len)?, dst, src.get(), len as i64) }
            })
        }
        (DType::BF16, DType::F32) => {
            let src = gpu.read::<bf16>("src", src)?;
            gpu.write::<f32>("dst", dst, |dst| {
                // SAFETY: both have len values.
                unsafe { launch::cast_bf16_to_f32(&gpu.elements(len)?, dst, src.get(), len as i64) }
            })
        }
        (from, to) => bail!("{op}: expected f32 to bf16 or back, got {from:?} to {to:?}"),
    }
}

/// `dst += src`, `dst` f32 and `src` f32 or bf16, both contiguous and of as many values.
///
/// # Errors
/// When they differ in length, or are not contiguous and on one GPU.
pub fn add_into(dst: &Tensor, src: &Tensor) -> Result<()> {
    by_dtype!("add_into", src.dtype(), T => add_into_as::<T>(dst, src))
}

fn add_into_as<T: Element>(dst: &Tensor, src: &Tensor) -> Result<()> {
    let op = "add_into";
    let gpu = Gpu::of(op, dst)?;
    let len = same_len(op, dst, src)?;
    let src = gpu.read::<T>("src", src)?;
    gpu.write::<f32>("dst", dst, |dst| {
        // SAFETY: both have len values.
        unsafe { launch::add_into::<T>(&gpu.elements(len)?, dst, src.get(), len as i64) }
    })
}

fn same_len(op: &str, dst: &Tensor, src: &Tensor) -> Result<usize> {
    let (len, expected) = (src.elem_count(), dst.elem_count());
    if len != expected {
        bail!("{op}: expected {expected} values, got {len}")
    }
    Ok(len)
}
