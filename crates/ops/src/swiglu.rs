//! Gated activation of Llama's feed-forward: `y = silu(gate) * up`, `silu(g) = g sigmoid(g)` (Shazeer 2020,
//! arXiv:2002.05202). `sigmoid(g) = 1 / (1 + e^-g)`.

use crate::chunks::rows_per_chunk;
use crate::dispatch::on_cuda;
use crate::exp::exp;
use crate::filled::{filled, filled2};
use crate::host::detached;
use crate::host_floats::{HostFloats, one_dtype};
use crate::vectorised::vectorised;
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
    one_shape(gate, up)?;
    if dy.dims() != gate.dims() {
        bail!(
            "{NAME}: expected a gradient of the shape of gate {:?}, got {:?}",
            gate.dims(),
            dy.dims()
        )
    }
    on_cuda!(gate => crate::cuda::swiglu_backward(gate, up, dy));
    let _timer = crate::op_timer::op("swiglu_backward");
    let (g, u) = on_host(gate, up)?;
    let dy = HostFloats::new(NAME, "the gradient", dy)?;
    let dtype = one_dtype(NAME, &[("gate", &g), ("the gradient", &dy)])?;
    let (dg, du) = backward_values(&g.read(), &u.read(), &dy.read());
    let tensor = |values| OpOutput::rounded(values, dtype, gate.shape()).into_tensor();
    Ok((tensor(dg), tensor(du)))
}

fn forward(gate: &Tensor, up: &Tensor) -> Result<OpOutput> {
    one_shape(gate, up)?;
    on_cuda!(gate => crate::cuda::swiglu_forward(gate, up));
    let _timer = crate::op_timer::op("swiglu_forward");
    let (g, u) = on_host(gate, up)?;
    let y = forward_values(&g.read(), &u.read());
    Ok(OpOutput::rounded(y, g.dtype(), gate.shape()))
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

fn forward_values(gate: &[f32], up: &[f32]) -> Vec<f32> {
    let len = rows_per_chunk(1);
    filled(gate.len(), len, gate.len(), |chunk, y| {
        let start = chunk * len;
        let (gate, up) = (&gate[start..][..y.len()], &up[start..][..y.len()]);
        vectorised(
            #[inline(always)]
            || {
                for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
                    // One rounding less than gate times the sigmoid.
                    *y = gate / (1.0 + exp(-gate)) * up;
                }
            },
        );
    })
}

/// With `s = sigmoid(gate)`: `dgate = dy up (s + gate s (1 - s))`, `dup = dy gate s`.
fn backward_values(gate: &[f32], up: &[f32], dy: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let len = rows_per_chunk(1);
    let sizes = (gate.len(), len);
    filled2(sizes, sizes, 2 * gate.len(), |chunk, dg, du| {
        let part = |values| -> &[f32] { &<[f32]>::split_at(values, chunk * len).1[..dg.len()] };
        let (gate, up, dy) = (part(gate), part(up), part(dy));
        vectorised(
            #[inline(always)]
            || {
                let inputs = gate.iter().zip(up).zip(dy);
                for ((dg, du), ((gate, up), dy)) in dg.iter_mut().zip(du).zip(inputs) {
                    let denominator = 1.0 + exp(-gate);
                    let (s, silu) = (1.0 / denominator, gate / denominator);
                    *dg = dy * up * (s + silu * (1.0 - s));
                    *du = dy * silu;
                }
            },
        );
    })
}
