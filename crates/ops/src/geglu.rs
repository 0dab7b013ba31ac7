//! Gated activation of Gemma's feed-forward: `y = gelu(gate) * up`, with GELU by its tanh (Hendrycks and Gimpel 2016, arXiv:1606.08415):
//! `gelu(g) = g (1 + tanh(u)) / 2 = g sigmoid(2 u)`, `u = sqrt(2 / pi) (g + 0.044715 g^3)`.

use crate::dispatch::on_cuda;
use crate::gated;
use candle_core::{Result, Tensor};
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

const NAME: &str = "geglu";

/// `sqrt(2 / pi)`.
pub(crate) const SCALE: f64 = FRAC_2_SQRT_PI * FRAC_1_SQRT_2;
pub(crate) const CUBIC: f64 = 0.044715;

/// `gelu(gate) * up`, element by element, outside any graph. Relative error against f64 about 1e-7.
///
/// # Shapes
/// `gate` and `up` of one shape -> the same shape; one dtype.
///
/// # Errors
/// When the shapes differ or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn geglu_forward(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    gated::one_shape(NAME, gate, up)?;
    on_cuda!(gate => crate::cuda::geglu_forward(gate, up));
    let _timer = crate::op_timer::op("geglu_forward");
    Ok(gated::forward(NAME, gate, up, argument)?.into_tensor())
}

/// Gradients of `gate` and `up` from that of the output, outside any graph.
///
/// # Shapes
/// `gate`, `up` and `dy` of one shape -> two of the same shape; one dtype.
///
/// # Errors
/// When the shapes differ or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn geglu_backward(gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
    gated::one_shape_with_grad(NAME, gate, up, dy)?;
    on_cuda!(gate => crate::cuda::geglu_backward(gate, up, dy));
    let _timer = crate::op_timer::op("geglu_backward");
    let [dg, du] = gated::backward(NAME, [gate, up, dy], argument)?;
    Ok((dg, du))
}

/// [`geglu_backward`] with the output itself, which the forward pass need not have kept: both in one pass.
///
/// # Shapes
/// `gate`, `up` and `dy` of one shape -> the gradients of `gate` and `up` and the output, of the same shape; one dtype.
///
/// # Errors
/// When the shapes differ or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn geglu_backward_and_output(
    gate: &Tensor,
    up: &Tensor,
    dy: &Tensor,
) -> Result<(Tensor, Tensor, Tensor)> {
    gated::one_shape_with_grad(NAME, gate, up, dy)?;
    on_cuda!(gate => {
        let (dg, du) = crate::cuda::geglu_backward(gate, up, dy)?;
        Ok((dg, du, crate::cuda::geglu_forward(gate, up)?))
    });
    let _timer = crate::op_timer::op("geglu_backward");
    let [dg, du, y] = gated::backward(NAME, [gate, up, dy], argument)?;
    Ok((dg, du, y))
}

/// The sigmoid's, `2 u`, and its derivative.
#[inline(always)]
fn argument(gate: f32) -> [f32; 2] {
    const LINEAR: f32 = (2.0 * SCALE) as f32;
    const CUBED: f32 = (2.0 * SCALE * CUBIC) as f32;
    let square = gate * gate;
    [
        gate * (LINEAR + CUBED * square),
        LINEAR + 3.0 * CUBED * square,
    ]
}
