//! Rotary positions on the GPU.

#![allow(unsafe_code)]

use super::rope::{NAME, RopeDirection};
use crate::cuda::element::{Element, by_dtype};
use crate::cuda::gpu::Gpu;
use crate::cuda::launch;
use crate::cuda::pointer::Out;
use crate::host::op_output::OpOutput;
use crate::host::values::detached;
use candle_core::{Result, Tensor};

/// `xs` turned, in its shape and dtype.
pub(crate) fn rope(
    xs: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    direction: RopeDirection,
) -> Result<OpOutput> {
    let xs = detached(xs)?;
    by_dtype!(NAME, "xs", xs, T => {
        let gpu = Gpu::of(NAME, &xs)?;
        let x = gpu.read::<T>("xs", &xs)?;
        let y = gpu.alloc::<T>(xs.elem_count())?;
        // SAFETY: both have as many values as xs.
        unsafe { gpu.copy(y.out(), x.get(), xs.elem_count()) }?;
        turn::<T>(&gpu, y.out(), &xs, [cos, sin], direction)?;
        Ok(y.into_output(xs.shape()))
    })
}

/// Turns `xs` where it is, and returns it; a tensor that is not contiguous is copied first.
pub(crate) fn rope_in_place(
    xs: Tensor,
    cos: &Tensor,
    sin: &Tensor,
    direction: RopeDirection,
) -> Result<Tensor> {
    let xs = detached(&xs)?;
    let gpu = Gpu::of(NAME, &xs)?;
    by_dtype!(NAME, "xs", xs, T => gpu.write::<T>("xs", &xs, |values| {
        turn::<T>(&gpu, values, &xs, [cos, sin], direction)
    }))?;
    Ok(xs)
}

/// `xs` has as many values as `like`, (b, t, h, d).
fn turn<T: Element>(
    gpu: &Gpu,
    xs: Out<T>,
    like: &Tensor,
    [cos, sin]: [&Tensor; 2],
    direction: RopeDirection,
) -> Result<()> {
    let (b, t, heads, d) = like.dims4()?;
    let (rows, half) = (b * t * heads, d / 2);
    let num_angles = cos.elem_count() / half.max(1);
    let (cos, sin) = (detached(cos)?, detached(sin)?);
    let (cos, sin) = (gpu.read::<f32>("cos", &cos)?, gpu.read::<f32>("sin", &sin)?);
    if rows * half == 0 {
        return Ok(());
    }
    let [num_angles, heads, num_pairs] = [num_angles, heads, half].map(|size| gpu.i32(size));
    let (num_angles, heads, num_pairs) = (num_angles?, heads?, num_pairs?);
    let sign = match direction {
        RopeDirection::Forward => 1.0,
        RopeDirection::Backward => -1.0,
    };
    let launch = gpu.elements(rows * half)?;
    let (cos, sin) = (cos.get(), sin.get());
    // SAFETY: xs has rows * 2 half values, cos and sin num_angles * half.
    unsafe {
        launch::rope(
            &launch,
            xs,
            cos,
            sin,
            rows as i64,
            num_angles,
            heads,
            num_pairs,
            sign,
        )
    }
}
