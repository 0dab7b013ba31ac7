//! Gated activations, act(gate) · up (arXiv:2002.05202), with explicit backward passes.

use candle_core::{Result, Tensor};
use candle_ops::{
    geglu_backward, geglu_backward_and_output, geglu_forward, swiglu_backward,
    swiglu_backward_and_output, swiglu_forward,
};

/// What the MLP does to its gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
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
            Self::GeluTanh => geglu_forward(gate, up),
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
            Self::GeluTanh => geglu_backward(gate, up, dy),
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
            Self::GeluTanh => geglu_backward_and_output(gate, up, dy),
        }
    }
}
