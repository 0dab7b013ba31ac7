//! Gated activation of Llama's feed-forward: `y = silu(gate) * up`, `silu(g) = g sigmoid(g)` (Shazeer 2020,
//! arXiv:2002.05202). `sigmoid(g) = 1 / (1 + e^-g)`.

use crate::dispatch::on_cuda;
use crate::element::{Element, by_float};
use crate::exp::exp;
use crate::host::detached;
use crate::host_floats::{HostFloats, one_dtype};
use crate::mapped::mapped;
use crate::{OpOutput, with_backward2};
use candle_core::{Result, Tensor, bail};

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
    same_shape(gate, up, dy)?;
    on_cuda!(gate => crate::cuda::swiglu_backward(gate, up, dy));
    let _timer = crate::op_timer::op("swiglu_backward");
    let [dg, du] = backward(
        [gate, up, dy],
        #[inline(always)]
        |inputs| {
            let [dg, du, _] = grads_and_output(inputs);
            [dg, du]
        },
    )?;
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
    same_shape(gate, up, dy)?;
    on_cuda!(gate => {
        let (dg, du) = crate::cuda::swiglu_backward(gate, up, dy)?;
        Ok((dg, du, crate::cuda::swiglu_forward(gate, up)?.into_tensor()))
    });
    let _timer = crate::op_timer::op("swiglu_backward");
    let [dg, du, y] = backward([gate, up, dy], grads_and_output)?;
    Ok((dg, du, y))
}

fn forward(gate: &Tensor, up: &Tensor) -> Result<OpOutput> {
    one_shape(gate, up)?;
    on_cuda!(gate => crate::cuda::swiglu_forward(gate, up));
    let _timer = crate::op_timer::op("swiglu_forward");
    let (g, u) = on_host(gate, up)?;
    let [y] = by_float!(g.dtype(), T => tensors(gate, mapped(
        [&g.read_as::<T>(), &u.read_as::<T>()],
        #[inline(always)]
        |[gate, up]| {
            // One rounding less than gate times the sigmoid.
            [gate / (1.0 + exp(-gate)) * up]
        },
    )));
    Ok(y)
}

/// What `f` makes of `[gate, up, dy]` at each place.
fn backward<const N: usize>(
    [gate, up, dy]: [&Tensor; 3],
    f: impl Fn([f32; 3]) -> [f32; N] + Send + Sync,
) -> Result<[Tensor; N]> {
    let (g, u) = on_host(gate, up)?;
    let dy = HostFloats::new(NAME, "the gradient", dy)?;
    let dtype = one_dtype(NAME, &[("gate", &g), ("the gradient", &dy)])?;
    let results = by_float!(dtype, T => tensors(gate, mapped(
        [&g.read_as::<T>(), &u.read_as::<T>(), &dy.read_as::<T>()],
        f,
    )));
    Ok(results.map(OpOutput::into_tensor))
}

fn tensors<T: Element, const N: usize>(like: &Tensor, values: [Vec<T>; N]) -> [OpOutput; N] {
    values.map(|values| OpOutput::of(values, like.shape()))
}

/// With `s = sigmoid(gate)`: `dgate = dy up (s + gate s (1 - s))`, `dup = dy gate s`, and the output, `gate s up`.
#[inline(always)]
fn grads_and_output([gate, up, dy]: [f32; 3]) -> [f32; 3] {
    let denominator = 1.0 + exp(-gate);
    let (s, silu) = (1.0 / denominator, gate / denominator);
    [dy * up * (s + silu * (1.0 - s)), dy * silu, silu * up]
}

fn same_shape(gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<()> {
    one_shape(gate, up)?;
    if dy.dims() != gate.dims() {
        bail!(
            "{NAME}: expected a gradient of the shape of gate {:?}, got {:?}",
            gate.dims(),
            dy.dims()
        )
    }
    Ok(())
}

fn one_shape(gate: &Tensor, up: &Tensor) -> Result<()> {
    if gate.dims() != up.dims() {
        bail!(
            "{NAME}: expected gate and up of one shape, got gate {:?} and up {:?}",
            gate.dims(),
            up.dims()
        )
    }
    Ok(())
}

fn on_host(gate: &Tensor, up: &Tensor) -> Result<(HostFloats, HostFloats)> {
    let gate = HostFloats::new(NAME, "gate", gate)?;
    let up = HostFloats::new(NAME, "up", up)?;
    one_dtype(NAME, &[("gate", &gate), ("up", &up)])?;
    Ok((gate, up))
}
