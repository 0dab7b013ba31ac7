//! Converting and adding on the GPU, value by value.

use super::launch;
use super::values::{Element, Gpu, by_dtype};
use candle_core::{DType, Result, Tensor, bail};
use half::bf16;

/// `dst`, f32, `= src` or, if `add`, `+= src`, f32 or bf16.
pub(crate) fn add_into(dst: &Tensor, add: bool, src: &Tensor) -> Result<()> {
    let gpu = Gpu::of("add_into", dst)?;
    same_len(&gpu, dst, src)?;
    let src = src.detach().contiguous()?;
    match (add, src.dtype()) {
        (true, dtype) => by_dtype!(gpu.op(), dtype, T => add_as::<T>(&gpu, dst, &src)),
        (false, DType::F32) => copy(&gpu, dst, &src),
        (false, DType::BF16) => widen(&gpu, dst, &src),
        (false, dtype) => bail!(
            "{}: expected values of F32 or BF16, got {dtype:?}",
            gpu.op()
        ),
    }
}

/// `dst`, bf16, `= src`, f32, rounded to the nearest, ties to even.
pub(crate) fn round_into(dst: &Tensor, src: &Tensor) -> Result<()> {
    let gpu = Gpu::of("round_into", dst)?;
    same_len(&gpu, dst, src)?;
    let (len, src) = (src.elem_count(), src.detach().contiguous()?);
    let src = gpu.read::<f32>("values", &src)?;
    gpu.write::<bf16>("dst", dst, |dst| {
        // SAFETY: both have len values.
        unsafe { launch::cast_f32_to_bf16(&gpu.elements(len)?, dst, src.get(), len as i64) }
    })
}

/// Sets every value of `dst`, f32, to `value`.
pub(super) fn fill(gpu: &Gpu, dst: &Tensor, value: f32) -> Result<()> {
    let len = dst.elem_count();
    gpu.write::<f32>("dst", dst, |dst| {
        // SAFETY: dst has len values.
        unsafe { launch::fill(&gpu.elements(len)?, dst, value, len as i64) }
    })
}

fn add_as<T: Element>(gpu: &Gpu, dst: &Tensor, src: &Tensor) -> Result<()> {
    let len = src.elem_count();
    let src = gpu.read::<T>("values", src)?;
    gpu.write::<f32>("dst", dst, |dst| {
        // SAFETY: both have len values.
        unsafe { launch::add_into::<T>(&gpu.elements(len)?, dst, src.get(), len as i64) }
    })
}

fn widen(gpu: &Gpu, dst: &Tensor, src: &Tensor) -> Result<()> {
    let len = src.elem_count();
    let src = gpu.read::<bf16>("values", src)?;
    gpu.write::<f32>("dst", dst, |dst| {
        // SAFETY: both have len values.
        unsafe { launch::cast_bf16_to_f32(&gpu.elements(len)?, dst, src.get(), len as i64) }
    })
}

fn copy(gpu: &Gpu, dst: &Tensor, src: &Tensor) -> Result<()> {
    let len = src.elem_count();
    let src = gpu.read::<f32>("values", src)?;
    gpu.write::<f32>("dst", dst, |dst| {
        // SAFETY: both have len values.
        unsafe { gpu.copy(dst, src.get(), len) }
    })
}

fn same_len(gpu: &Gpu, dst: &Tensor, src: &Tensor) -> Result<()> {
    let (len, got) = (src.elem_count(), dst.elem_count());
    if len != got {
        bail!("{}: expected dst of {len} values, got {got}", gpu.op())
    }
    Ok(())
}
