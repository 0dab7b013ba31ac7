//! Gated activation of Llama's feed-forward: `y = silu(gate) * up`, `silu(g) = g sigmoid(g)` (Shazeer 2020,
//! arXiv:2002.05202). `sigmoid(g) = 1 / (1 + e^-g)`.

use crate::dispatch::on_cuda;
use crate::host::detached;
use crate::{OpOutput, gated, with_backward2};
use candle_core::{Result, Tensor};

const NAME: &str = "swiglu";

/// `silu(gate) * up`, element by element.
///
/// Relative error against f64 about 5e-8, that of the gradient of `gate` 7e-8: see `docs/accuracy.md`.
///
/// # Shapes
/// `gate` and `up` of one shape -> the same shape; one dtype.
///
/// # Errors
/// When the shapes differ or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let y = forward(gate, up)?;
    let (g, u) = (detached(gate)?, detached(up)?);
    let (gate_tracked, up_tracked) = (gate.track_op(), up.track_op());
    with_backward2(gate, up, y, NAME, move |dy| {
        let (dg, du) = swiglu_backward(&g, &u, dy)?;
        Ok((gate_tracked.then_some(dg), up_tracked.then_some(du)))
    })
}

/// `silu(gate) * up`, element by element, outside any graph.
///
/// # Shapes
/// `gate` and `up` of one shape -> the same shape; one dtype.
///
/// # Errors
/// When the shapes differ or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn swiglu_forward(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    Ok(forward(gate, up)?.into_tensor())
}

/// Gradients of `gate` and `up` from that of the output, outside any graph.
///
/// # Shapes
/// `gate`, `up` and `dy` of one shape -> two of the same shape; one dtype.
///
/// # Errors
/// When the shapes differ or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn swiglu_backward(gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
    gated::one_shape_with_grad(NAME, gate, up, dy)?;
    on_cuda!(gate => crate::cuda::swiglu_backward(gate, up, dy));
    let _timer = crate::op_timer::op("swiglu_backward");
    let [dg, du] = gated::backward(NAME, [gate, up, dy], argument)?;
    Ok((dg, du))
}

/// [`swiglu_backward`] with the output itself, which the forward pass need not have kept: both in one pass.
///
/// # Shapes
/// `gate`, `up` and `dy` of one shape -> the gradients of `gate` and `up` and the output, of the same shape; one dtype.
///
/// # Errors
/// When the shapes differ or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn swiglu_backward_and_output(
    gate: &Tensor,
    up: &Tensor,
    dy: &Tensor,
) -> Result<(Tensor, Tensor, Tensor)> {
    gated::one_shape_with_grad(NAME, gate, up, dy)?;
    on_cuda!(gate => {
        let (dg, du) = crate::cuda::swiglu_backward(gate, up, dy)?;
        Ok((dg, du, crate::cuda::swiglu_forward(gate, up)?.into_tensor()))
    });
    let _timer = crate::op_timer::op("swiglu_backward");
    let [dg, du, y] = gated::backward(NAME, [gate, up, dy], argument)?;
    Ok((dg, du, y))
}

fn forward(gate: &Tensor, up: &Tensor) -> Result<OpOutput> {
    gated::one_shape(NAME, gate, up)?;
    on_cuda!(gate => crate::cuda::swiglu_forward(gate, up));
    let _timer = crate::op_timer::op("swiglu_forward");
    gated::forward(NAME, gate, up, argument)
}

/// The sigmoid's, which is the gate, and its derivative.
#[inline(always)]
fn argument(gate: f32) -> [f32; 2] {
    [gate, 1.0]
}
