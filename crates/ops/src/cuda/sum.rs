//! The sum of losses on the GPU. candle's own sums send the shape to the GPU at each call.

use super::gpu::{BLOCK, Gpu};
use super::launch;
use crate::host::detached;
use candle_core::{DType, Result, Tensor, bail};

/// Writes or adds the sum of `xs`, f32, to `dst`, one f64 value.
pub(crate) fn sum_into(dst: &Tensor, add: bool, xs: &Tensor) -> Result<()> {
    let gpu = Gpu::of("sum_into", dst)?;
    if xs.dtype() != DType::F32 {
        bail!("{}: expected xs of F32, got {:?}", gpu.op(), xs.dtype())
    }
    let xs = detached(xs)?.to_dtype(DType::F64)?;
    let values = gpu.read::<f64>("xs", &xs)?;
    let (launch, count) = (gpu.blocks(1, BLOCK, 256)?, gpu.i32(xs.elem_count())?);
    gpu.write::<f64>("dst", dst, |dst| {
        // SAFETY: xs has count values, dst one.
        unsafe { launch::sum_partials_f64(&launch, dst, values.get(), count, add.into()) }
    })
}
