//! Rotary positions on the GPU; the equations are those of the crate's `rope`.

use super::launch;
use super::values::{Element, Gpu, by_dtype, dims_must_be};
use crate::RopeDirection;
use candle_core::{Result, Tensor, bail};

const NAME: &str = "rope";

/// Turns `xs` where it is, and returns it; a tensor that is not contiguous is copied first.
///
/// # Shapes
/// `xs (b, t, heads, d)` f32 or bf16, `cos` and `sin` `(t, d / 2)` f32.
///
/// # Errors
/// When the shapes or dtypes do not fit, or a tensor is not on the same GPU.
pub fn rope_in_place(
    xs: Tensor,
    cos: &Tensor,
    sin: &Tensor,
    direction: RopeDirection,
) -> Result<Tensor> {
    let xs = xs.detach().contiguous()?;
    let sign = match direction {
        RopeDirection::Forward => 1.0,
        RopeDirection::Backward => -1.0,
    };
    by_dtype!(NAME, xs.dtype(), T => turn::<T>(&xs, cos, sin, sign))?;
    Ok(xs)
}

fn turn<T: Element>(xs: &Tensor, cos: &Tensor, sin: &Tensor, sign: f32) -> Result<()> {
    let gpu = Gpu::of(NAME, xs)?;
    let (b, t, heads, d) = xs.dims4()?;
    if !d.is_multiple_of(2) {
        bail!("{NAME}: expected a head of even size, got {d}")
    }
    let (rows, half) = (b * t * heads, d / 2);
    dims_must_be(NAME, "cos", cos, &[t, half])?;
    dims_must_be(NAME, "sin", sin, &[t, half])?;
    let (cos, sin) = (gpu.read::<f32>("cos", cos)?, gpu.read::<f32>("sin", sin)?);
    let (t, heads, num_pairs) = (gpu.i32(t)?, gpu.i32(heads)?, gpu.i32(half)?);
    gpu.write::<T>("xs", xs, |xs| {
        let launch = gpu.elements(rows * half)?;
        let (cos, sin) = (cos.get(), sin.get());
        // SAFETY: xs has rows * 2 half values, cos and sin t * half.
        unsafe {
            launch::rope(
                &launch,
                xs,
                cos,
                sin,
                rows as i64,
                t,
                heads,
                num_pairs,
                sign,
            )
        }
    })
}
