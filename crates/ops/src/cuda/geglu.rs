//! `gelu(gate) * up` on the GPU, made of candle's operations in f32, rounded once; the equations are those of the crate's `geglu`, which
//! checks the shapes.

use crate::geglu::{CUBIC, SCALE};
use candle_core::{DType, Result, Tensor};

/// `gelu(gate) * up`, in their shape and dtype.
pub(crate) fn geglu_forward(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let (gate, up) = (gate.detach(), up.detach());
    let (x, dtype) = (gate.to_dtype(DType::F32)?, gate.dtype());
    let y = (&x * tanh(&x)?.affine(0.5, 0.5)?)?;
    (y * up.to_dtype(DType::F32)?)?.to_dtype(dtype)
}

/// Gradients of `gate` and `up` from that of the output, in their shape and dtype.
pub(crate) fn geglu_backward(gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
    let (gate, up, dy) = (gate.detach(), up.detach(), dy.detach());
    let (x, dtype) = (gate.to_dtype(DType::F32)?, gate.dtype());
    let (up, dy) = (up.to_dtype(DType::F32)?, dy.to_dtype(DType::F32)?);
    let tanh = tanh(&x)?;
    // With u the argument of tanh: (x (1 + tanh u) / 2)' = (1 + tanh u) / 2 + x (1 - tanh^2 u) / 2 u'
    let half = tanh.affine(0.5, 0.5)?;
    let du = x.sqr()?.affine(3.0 * SCALE * CUBIC, SCALE)?;
    let slope = (&half + ((&x * tanh.sqr()?.affine(-0.5, 0.5)?)? * du)?)?;
    let dgate = ((&dy * up)? * slope)?.to_dtype(dtype)?;
    Ok((dgate, (dy * (x * half)?)?.to_dtype(dtype)?))
}

/// `tanh(sqrt(2 / pi) (x + 0.044715 x^3))`.
fn tanh(x: &Tensor) -> Result<Tensor> {
    (x * x.sqr()?.affine(SCALE * CUBIC, SCALE)?)?.tanh()
}
