//! Gated activation of Llama's feed-forward: `y = silu(gate) * up`, `silu(g) = g sigmoid(g)` (Shazeer 2020,
//! arXiv:2002.05202).

use crate::chunks::{for_each_chunk, for_each_chunk2, rows_per_chunk};
use crate::exp::sigmoid;
use crate::host::HostF32;
use crate::with_backward2;
use candle_core::{Result, Tensor, bail};

const NAME: &str = "swiglu";

/// `silu(gate) * up`, element by element.
///
/// # Shapes
/// `gate` and `up` of one shape -> the same shape; f32.
///
/// # Errors
/// When the shapes differ or a tensor is not f32 on the CPU.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    if gate.dims() != up.dims() {
        bail!(
            "{NAME}: expected gate and up of one shape, got gate {:?} and up {:?}",
            gate.dims(),
            up.dims()
        )
    }
    let g = HostF32::new(NAME, "gate", gate)?;
    let u = HostF32::new(NAME, "up", up)?;
    let y = forward(&g.read(), &u.read());
    let (gate_tracked, up_tracked) = (gate.track_op(), up.track_op());
    with_backward2(gate, up, (y, gate.shape()), NAME, move |dy| {
        let dy = HostF32::new(NAME, "the gradient", dy)?;
        let (dg, du) = backward(&g.read(), &u.read(), &dy.read());
        let (shape, device) = (dy.tensor().shape(), dy.tensor().device());
        let dg = gate_tracked.then(|| Tensor::from_vec(dg, shape, device));
        let du = up_tracked.then(|| Tensor::from_vec(du, shape, device));
        Ok((dg.transpose()?, du.transpose()?))
    })
}

fn forward(gate: &[f32], up: &[f32]) -> Vec<f32> {
    let mut y = vec![0f32; gate.len()];
    let len = rows_per_chunk(1);
    for_each_chunk(&mut y, len, gate.len(), |chunk, y| {
        let (gate, up) = (
            &gate[chunk * len..][..y.len()],
            &up[chunk * len..][..y.len()],
        );
        for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
            *y = gate * sigmoid(*gate) * up;
        }
    });
    y
}

/// With `s = sigmoid(gate)`: `dgate = dy up s (1 + gate (1 - s))`, `dup = dy gate s`.
fn backward(gate: &[f32], up: &[f32], dy: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let (mut dg, mut du) = (vec![0f32; gate.len()], vec![0f32; gate.len()]);
    let len = rows_per_chunk(1);
    for_each_chunk2(
        (&mut dg, len),
        (&mut du, len),
        gate.len(),
        |chunk, dg, du| {
            let part = |values| -> &[f32] { &<[f32]>::split_at(values, chunk * len).1[..dg.len()] };
            let (gate, up, dy) = (part(gate), part(up), part(dy));
            for ((dg, du), ((gate, up), dy)) in
                dg.iter_mut().zip(du).zip(gate.iter().zip(up).zip(dy))
            {
                let s = sigmoid(*gate);
                *dg = dy * up * s * (1.0 + gate * (1.0 - s));
                *du = dy * gate * s;
            }
        },
    );
    (dg, du)
}
