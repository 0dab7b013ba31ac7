//! The sum of losses, without the host having to read or to send anything.

use crate::dispatch::on_cuda;
use crate::grad_norm::one_value;
use crate::host::HostF32;
use crate::in_place::write;
use candle_core::{Result, Tensor};

const NAME: &str = "sum_into";

/// Writes, or adds if `add`, the sum of `xs` in f64 to `dst`; outside any graph.
///
/// # Shapes
/// `dst` one f64 value; `xs`, f32, of any shape, on the same device.
///
/// # Errors
/// When `dst` is not one f64 value, `xs` is not f32, or they are on different devices.
pub fn sum_into(dst: &Tensor, add: bool, xs: &Tensor) -> Result<()> {
    one_value(NAME, "dst", dst)?;
    on_cuda!(dst => crate::cuda::sum_into(dst, add, xs));
    let xs = HostF32::new(NAME, "xs", xs)?;
    let sum: f64 = xs.read().iter().copied().map(f64::from).sum();
    write::<f64>(NAME, "dst", dst, 1, |dst| {
        dst[0] = if add { dst[0] + sum } else { sum };
    })
}
