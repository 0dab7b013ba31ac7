//! The global norm of gradients on the GPU, and the factor that clips them, without the host reading either.

use super::launch;
use super::values::{BLOCK, Element, Gpu, by_dtype};
use candle_core::{Result, Tensor, bail};

/// Blocks that leave a partial sum each.
const MAX_PARTIALS: usize = 1056;

/// Writes, or adds if `add`, the sum of the squares of `src` (f32 or bf16, contiguous) to the one f64 value of `dst`.
///
/// # Errors
/// When `dst` is not one f64 value, or a tensor is not contiguous and on the same GPU.
pub fn sum_of_squares_into(dst: &Tensor, add: bool, src: &Tensor) -> Result<()> {
    by_dtype!("sum_of_squares_into", src.dtype(), T => sum::<T>(dst, add, src))
}

fn sum<T: Element>(dst: &Tensor, add: bool, src: &Tensor) -> Result<()> {
    let op = "sum_of_squares_into";
    let gpu = Gpu::of(op, dst)?;
    one_value(op, dst)?;
    let len = src.elem_count();
    let num_partials = len.div_ceil(2048).clamp(1, MAX_PARTIALS);
    let src = gpu.read::<T>("src", src)?;
    let partials = gpu.alloc_f64(num_partials)?;
    gpu.write::<f64>("dst", dst, |dst| {
        let sums = partials.out();
        // SAFETY: src has len values, partials one for each block; the second launch follows the first.
        unsafe {
            let blocks = gpu.blocks(num_partials, BLOCK, 256)?;
            launch::sum_of_squares::<T>(&blocks, sums, src.get(), len as i64)?;
            let (last, count) = (gpu.blocks(1, BLOCK, 256)?, gpu.i32(num_partials)?);
            launch::sum_partials_f64(&last, dst, sums.read(), count, add.into())
        }
    })
}

/// `min(1, max_norm / sqrt(sum))` of the sum of squares `sum`, one f64 value; NaN if that is not finite. One f32 value, to be
/// [`adamw`](super::adamw)'s `device_scale`.
///
/// # Errors
/// When `sum` is not one f64 value on CUDA.
pub fn clip_scale(sum: &Tensor, max_norm: f64) -> Result<Tensor> {
    let op = "clip_scale";
    let gpu = Gpu::of(op, sum)?;
    one_value(op, sum)?;
    let sum = gpu.read::<f64>("sum", sum)?;
    let scale = gpu.alloc::<f32>(1)?;
    let launch = gpu.blocks(1, 32, 0)?;
    // SAFETY: both are one value.
    unsafe { launch::clip_scale_f32(&launch, scale.out(), sum.get(), max_norm) }?;
    Ok(scale.into_tensor(1))
}

fn one_value(op: &str, tensor: &Tensor) -> Result<()> {
    if tensor.elem_count() != 1 {
        bail!("{op}: expected one value, got {:?}", tensor.dims())
    }
    Ok(())
}
