//! Gated activations `y = act(gate) * up` on the CPU (Shazeer 2020, arXiv:2002.05202), for `act(x) = x sigmoid(z(x))`,
//! `sigmoid(z) = 1 / (1 + e^-z)`: SiLU, of which `z(x) = x`, and GELU by its tanh, as `1 + tanh(z / 2) = 2 sigmoid(z)`.

use crate::OpOutput;
use crate::element::{Element, by_float};
use crate::exp::exp;
use crate::host_floats::{HostFloats, one_dtype};
use crate::mapped::mapped;
use candle_core::{Result, Tensor, bail};

/// `z(x)` and its derivative, marked `#[inline(always)]`.
pub(crate) trait Argument: Fn(f32) -> [f32; 2] + Copy + Send + Sync {}
impl<F: Fn(f32) -> [f32; 2] + Copy + Send + Sync> Argument for F {}

/// An error unless `gate` and `up` have one shape.
pub(crate) fn one_shape(op: &str, gate: &Tensor, up: &Tensor) -> Result<()> {
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
pub(crate) fn one_shape_with_grad(op: &str, gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<()> {
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

/// `act(gate) * up` of tensors of one shape.
pub(crate) fn forward(op: &str, gate: &Tensor, up: &Tensor, z: impl Argument) -> Result<OpOutput> {
    let (g, u) = on_host(op, gate, up)?;
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

/// The gradients of `gate` and `up` from that of the output, `dy`, and, of three results, the output; of tensors of one shape.
pub(crate) fn backward<const N: usize>(
    op: &str,
    [gate, up, dy]: [&Tensor; 3],
    z: impl Argument,
) -> Result<[Tensor; N]> {
    let (g, u) = on_host(op, gate, up)?;
    let dy = HostFloats::new(op, "the gradient", dy)?;
    let dtype = one_dtype(op, &[("gate", &g), ("the gradient", &dy)])?;
    let results = by_float!(dtype, T => tensors(gate, mapped(
        [&g.read_as::<T>(), &u.read_as::<T>(), &dy.read_as::<T>()],
        #[inline(always)]
        |inputs| {
            let mut results = [0f32; N];
            for (result, value) in results.iter_mut().zip(grads_and_output(inputs, z)) {
                *result = value;
            }
            results
        },
    )));
    Ok(results.map(OpOutput::into_tensor))
}

/// With `s = sigmoid(z(gate))`: `dgate = dy up (s + gate s (1 - s) z'(gate))`, `dup = dy gate s`, and the output, `gate s up`.
#[inline(always)]
fn grads_and_output([gate, up, dy]: [f32; 3], z: impl Argument) -> [f32; 3] {
    let [z, slope] = z(gate);
    let denominator = 1.0 + exp(-z);
    let (s, act) = (1.0 / denominator, gate / denominator);
    [dy * up * (s + act * (1.0 - s) * slope), dy * act, act * up]
}

fn tensors<T: Element, const N: usize>(like: &Tensor, values: [Vec<T>; N]) -> [OpOutput; N] {
    values.map(|values| OpOutput::of(values, like.shape()))
}

fn on_host(op: &str, gate: &Tensor, up: &Tensor) -> Result<(HostFloats, HostFloats)> {
    let gate = HostFloats::new(op, "gate", gate)?;
    let up = HostFloats::new(op, "up", up)?;
    one_dtype(op, &[("gate", &gate), ("up", &up)])?;
    Ok((gate, up))
}
