//! Sums in f64 on the GPU.

#![allow(unsafe_code)]

use crate::cuda::element::{Element, by_dtype};
use crate::cuda::gpu::{BLOCK, Gpu};
use crate::cuda::launch;
use crate::cuda::pointer::Out;
use crate::host::values::detached;
use candle_core::{DType, Result, Tensor};

/// Blocks that leave a partial sum each.
const MAX_PARTIALS: usize = 1056;

/// Writes or adds the sum of `xs`, f32 or f64, to `dst`, one f64 value.
pub(crate) fn sum_into(dst: &Tensor, add: bool, xs: &Tensor) -> Result<()> {
    let gpu = Gpu::of("sum_into", dst)?;
    let xs = detached(xs)?.to_dtype(DType::F64)?;
    let values = gpu.read::<f64>("xs", &xs)?;
    let (launch, count) = (gpu.blocks(1, BLOCK, 256)?, gpu.i32(xs.elem_count())?);
    gpu.write::<f64>("dst", dst, |dst| {
        // SAFETY: xs has count values, dst one.
        unsafe { launch::sum_partials_f64(&launch, dst, values.get(), count, add.into()) }
    })
}

/// The sum of the squares of `src` as an f64 scalar.
pub(crate) fn sum_of_squares(src: &Tensor) -> Result<Tensor> {
    let gpu = Gpu::of("sum_of_squares", src)?;
    let src = detached(src)?;
    let dst = gpu.alloc::<f64>(1)?;
    by_dtype!(gpu.op(), "xs", src, T => launch_sum::<T>(&gpu, dst.out(), false, &src))?;
    Ok(dst.into_tensor(()))
}

/// Writes or adds it to `dst`, one f64 value.
pub(crate) fn sum_of_squares_into(dst: &Tensor, add: bool, src: &Tensor) -> Result<()> {
    let gpu = Gpu::of("sum_of_squares_into", dst)?;
    let src = detached(src)?;
    gpu.write::<f64>(
        "dst",
        dst,
        |dst| by_dtype!(gpu.op(), "xs", src, T => launch_sum::<T>(&gpu, dst, add, &src)),
    )
}

/// `dst` is one value.
fn launch_sum<T: Element>(gpu: &Gpu, dst: Out<f64>, add: bool, src: &Tensor) -> Result<()> {
    let len = src.elem_count();
    let num_partials = len.div_ceil(2048).clamp(1, MAX_PARTIALS);
    let src = gpu.read::<T>("xs", src)?;
    let partials = gpu.alloc::<f64>(num_partials)?;
    let sums = partials.out();
    let blocks = gpu.blocks(num_partials, BLOCK, 256)?;
    let (last, count) = (gpu.blocks(1, BLOCK, 256)?, gpu.i32(num_partials)?);
    // SAFETY: src has len values, partials one for each block, dst one; the second launch follows the first.
    unsafe {
        launch::sum_of_squares::<T>(&blocks, sums, src.get(), len as i64)?;
        launch::sum_partials_f64(&last, dst, sums.read(), count, add.into())
    }
}
