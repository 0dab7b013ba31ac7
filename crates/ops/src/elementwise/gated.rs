//! Gated activations `y = act(gate) * up` (Shazeer 2020, arXiv:2002.05202), for `act(x) = x sigmoid(z(x))`, `sigmoid(z) = 1 / (1 + e^-z)`:
//! SwiGLU of Llama's feed-forward has SiLU, of which `z(x) = x`; GEGLU of Gemma's has GELU by its tanh (Hendrycks and Gimpel 2016,
//! arXiv:1606.08415), `x (1 + tanh(u)) / 2 = x sigmoid(2 u)`, `u = sqrt(2 / pi) (x + 0.044715 x^3)`.

use crate::cpu::element::{Element, by_float};
use crate::cpu::exp::exp;
use crate::cpu::mapped::mapped;
use crate::host::floats::HostFloats;
use crate::host::on_cuda::on_cuda;
use crate::host::op_output::OpOutput;
use crate::host::values::detached;
use crate::host::with_backward::with_backward;
use crate::timing::op_timer;
use candle_core::{Result, Tensor, bail};
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

/// `sqrt(2 / pi)`.
pub(crate) const SCALE: f64 = FRAC_2_SQRT_PI * FRAC_1_SQRT_2;
pub(crate) const CUBIC: f64 = 0.044715;

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
    let y = forward(Gated::Swiglu, gate, up)?;
    let (g, u) = (detached(gate)?, detached(up)?);
    let (gate_tracked, up_tracked) = (gate.track_op(), up.track_op());
    with_backward([gate, up], y, "swiglu", move |dy| {
        let (dg, du) = swiglu_backward(&g, &u, dy)?;
        Ok([gate_tracked.then_some(dg), up_tracked.then_some(du)])
    })
}

/// [`swiglu`] outside any graph.
///
/// # Errors
/// As [`swiglu`].
pub fn swiglu_forward(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    Ok(forward(Gated::Swiglu, gate, up)?.into_tensor())
}

/// Gradients of `gate` and `up` from that of the output of [`swiglu`], outside any graph.
///
/// # Shapes
/// `gate`, `up` and `dy` of one shape -> two of the same shape; one dtype.
///
/// # Errors
/// When the shapes differ or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn swiglu_backward(gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
    backward(Gated::Swiglu, gate, up, dy)
}

/// [`swiglu_backward`] with the output itself, which the forward pass need not have kept: both in one pass.
///
/// # Errors
/// As [`swiglu_backward`].
pub fn swiglu_backward_and_output(
    gate: &Tensor,
    up: &Tensor,
    dy: &Tensor,
) -> Result<(Tensor, Tensor, Tensor)> {
    backward_and_output(Gated::Swiglu, gate, up, dy)
}

/// `gelu(gate) * up`, element by element, outside any graph. Relative error against f64 about 1e-7.
///
/// # Shapes
/// `gate` and `up` of one shape -> the same shape; one dtype.
///
/// # Errors
/// When the shapes differ or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn geglu_forward(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    Ok(forward(Gated::Geglu, gate, up)?.into_tensor())
}

/// Gradients of `gate` and `up` from that of the output of [`geglu_forward`], outside any graph; shapes as of [`swiglu_backward`].
///
/// # Errors
/// As [`swiglu_backward`].
pub fn geglu_backward(gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
    backward(Gated::Geglu, gate, up, dy)
}

/// [`geglu_backward`] with the output itself, which the forward pass need not have kept: both in one pass.
///
/// # Errors
/// As [`swiglu_backward`].
pub fn geglu_backward_and_output(
    gate: &Tensor,
    up: &Tensor,
    dy: &Tensor,
) -> Result<(Tensor, Tensor, Tensor)> {
    backward_and_output(Gated::Geglu, gate, up, dy)
}

/// A gated activation.
#[derive(Clone, Copy)]
pub(crate) enum Gated {
    Swiglu,
    Geglu,
}

impl Gated {
    /// What errors call it, and timelines its passes.
    fn names(self) -> [&'static str; 3] {
        match self {
            Self::Swiglu => ["swiglu", "swiglu_forward", "swiglu_backward"],
            Self::Geglu => ["geglu", "geglu_forward", "geglu_backward"],
        }
    }
}

/// `z(x)` of SiLU and its derivative.
#[inline(always)]
fn silu(x: f32) -> [f32; 2] {
    [x, 1.0]
}

/// `z(x)` of GELU, `2 u`, and its derivative.
#[inline(always)]
fn gelu(x: f32) -> [f32; 2] {
    const LINEAR: f32 = (2.0 * SCALE) as f32;
    const CUBED: f32 = (2.0 * SCALE * CUBIC) as f32;
    let square = x * x;
    [x * (LINEAR + CUBED * square), LINEAR + 3.0 * CUBED * square]
}

fn forward(gated: Gated, gate: &Tensor, up: &Tensor) -> Result<OpOutput> {
    let [name, timed, _] = gated.names();
    one_shape(name, gate, up)?;
    on_cuda!(gate => super::gated_gpu::gated_forward(gated, gate, up));
    let _timer = op_timer::op(timed);
    match gated {
        Gated::Swiglu => forward_on_host(name, gate, up, silu),
        Gated::Geglu => forward_on_host(name, gate, up, gelu),
    }
}

fn backward(gated: Gated, gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
    one_shape_with_grad(gated.names()[0], gate, up, dy)?;
    on_cuda!(gate => super::gated_gpu::gated_backward(gated, gate, up, dy));
    let [dg, du] = backward_on_host(gated, [gate, up, dy])?;
    Ok((dg, du))
}

fn backward_and_output(
    gated: Gated,
    gate: &Tensor,
    up: &Tensor,
    dy: &Tensor,
) -> Result<(Tensor, Tensor, Tensor)> {
    one_shape_with_grad(gated.names()[0], gate, up, dy)?;
    on_cuda!(gate => {
        let (dg, du) = super::gated_gpu::gated_backward(gated, gate, up, dy)?;
        Ok((dg, du, super::gated_gpu::gated_forward(gated, gate, up)?.into_tensor()))
    });
    let [dg, du, y] = backward_on_host(gated, [gate, up, dy])?;
    Ok((dg, du, y))
}

fn forward_on_host(
    op: &str,
    gate: &Tensor,
    up: &Tensor,
    z: impl Fn(f32) -> [f32; 2] + Send + Sync,
) -> Result<OpOutput> {
    let [g, u] = HostFloats::of_one_dtype(op, [("gate", gate), ("up", up)])?;
    let [y] = by_float!(g.dtype(), T => tensors(gate, mapped(
        [&g.read_as::<T>(), &u.read_as::<T>()],
        #[inline(always)]
        |[gate, up]| {
            // One rounding less than gate times the sigmoid.
            [gate / (1.0 + exp(-z(gate)[0])) * up]
        },
    )));
    Ok(y)
}

fn backward_on_host<const N: usize>(gated: Gated, inputs: [&Tensor; 3]) -> Result<[Tensor; N]> {
    let [name, _, timed] = gated.names();
    let _timer = op_timer::op(timed);
    match gated {
        Gated::Swiglu => grads_on_host(name, inputs, silu),
        Gated::Geglu => grads_on_host(name, inputs, gelu),
    }
}

/// The gradients of `gate` and `up` from that of the output, `dy`, and, of three results, the output.
fn grads_on_host<const N: usize>(
    op: &str,
    [gate, up, dy]: [&Tensor; 3],
    z: impl Fn(f32) -> [f32; 2] + Send + Sync,
) -> Result<[Tensor; N]> {
    let arguments = [("gate", gate), ("up", up), ("the gradient", dy)];
    let [g, u, dy] = HostFloats::of_one_dtype(op, arguments)?;
    let results = by_float!(dy.dtype(), T => tensors(gate, mapped(
        [&g.read_as::<T>(), &u.read_as::<T>(), &dy.read_as::<T>()],
        #[inline(always)]
        |inputs| {
            let mut results = [0f32; N];
            for (result, value) in results.iter_mut().zip(grads_and_output(inputs, &z)) {
                *result = value;
            }
            results
        },
    )));
    Ok(results.map(OpOutput::into_tensor))
}

/// With `s = sigmoid(z(gate))`: `dgate = dy up (s + gate s (1 - s) z'(gate))`, `dup = dy gate s`, and the output, `gate s up`.
#[inline(always)]
fn grads_and_output([gate, up, dy]: [f32; 3], z: impl Fn(f32) -> [f32; 2]) -> [f32; 3] {
    let [z, slope] = z(gate);
    let denominator = 1.0 + exp(-z);
    let (s, act) = (1.0 / denominator, gate / denominator);
    [dy * up * (s + act * (1.0 - s) * slope), dy * act, act * up]
}

fn tensors<T: Element, const N: usize>(like: &Tensor, values: [Vec<T>; N]) -> [OpOutput; N] {
    values.map(|values| OpOutput::of(values, like.shape()))
}

/// An error unless `gate` and `up` have one shape.
fn one_shape(op: &str, gate: &Tensor, up: &Tensor) -> Result<()> {
    if gate.dims() != up.dims() {
        bail!(
            "{op}: expected gate and up of one shape, got gate {:?} and up {:?}",
            gate.dims(),
            up.dims()
        )
    }
    Ok(())
}

/// An error unless `gate`, `up` and the gradient `dy` have one shape.
fn one_shape_with_grad(op: &str, gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<()> {
    one_shape(op, gate, up)?;
    if dy.dims() != gate.dims() {
        bail!(
            "{op}: expected a gradient of the shape of gate {:?}, got {:?}",
            gate.dims(),
            dy.dims()
        )
    }
    Ok(())
}
