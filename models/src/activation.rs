//! Gated activations, act(gate) · up (arXiv:2002.05202), with explicit backward passes. SiLU's is fused; GELU's is made of candle's
//! operations in f32, rounded once.

use candle_core::{DType, Result, Tensor};
use candle_ops::{swiglu_backward, swiglu_backward_and_output, swiglu_forward};

/// What the MLP does to its gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x · sigmoid(x)
    Silu,
    /// GELU (arXiv:1606.08415) by its tanh: x · (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2
    GeluTanh,
}

impl Activation {
    /// act(gate) · up, element by element.
    pub(crate) fn forward(self, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
        match self {
            Self::Silu => swiglu_forward(gate, up),
            Self::GeluTanh => {
                let (x, dtype) = (gate.to_dtype(DType::F32)?, gate.dtype());
                let ys = (&x * gelu_tanh(&x)?.affine(0.5, 0.5)?)?;
                (ys * up.to_dtype(DType::F32)?)?.to_dtype(dtype)
            }
        }
    }

    /// The gradients of `gate` and `up` from that of the output.
    pub(crate) fn backward(
        self,
        gate: &Tensor,
        up: &Tensor,
        dy: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        match self {
            Self::Silu => swiglu_backward(gate, up, dy),
            Self::GeluTanh => {
                let (x, dtype) = (gate.to_dtype(DType::F32)?, gate.dtype());
                let (up, dy) = (up.to_dtype(DType::F32)?, dy.to_dtype(DType::F32)?);
                let tanh = gelu_tanh(&x)?;
                // With u the argument of tanh: (x (1 + tanh u) / 2)' = (1 + tanh u) / 2 + x (1 - tanh² u) / 2 · u'
                let half = tanh.affine(0.5, 0.5)?;
                let du = x.sqr()?.affine(3.0 * SCALE * CUBIC, SCALE)?;
                let slope = (&half + ((&x * tanh.sqr()?.affine(-0.5, 0.5)?)? * du)?)?;
                let dgate = ((&dy * up)? * slope)?.to_dtype(dtype)?;
                Ok((dgate, (dy * (x * half)?)?.to_dtype(dtype)?))
            }
        }
    }

    /// [`Self::backward`] and [`Self::forward`]: the gradients of `gate` and `up`, and the output.
    pub(crate) fn backward_and_output(
        self,
        gate: &Tensor,
        up: &Tensor,
        dy: &Tensor,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        match self {
            Self::Silu => swiglu_backward_and_output(gate, up, dy),
            Self::GeluTanh => {
                let (dgate, dup) = self.backward(gate, up, dy)?;
                Ok((dgate, dup, self.forward(gate, up)?))
            }
        }
    }
}

/// √(2/π)
const SCALE: f64 = std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;
const CUBIC: f64 = 0.044715;

/// tanh(√(2/π) (x + 0.044715 x³)), in f32.
fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
    (x * x.sqr()?.affine(SCALE * CUBIC, SCALE)?)?.tanh()
}
