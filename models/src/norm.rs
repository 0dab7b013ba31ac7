//! RMS norm (arXiv:1910.07467) of the last dim, with an explicit backward pass; every tensor-parallel rank has all of its weight.

use candle_core::{Result, Tensor};
use candle_nn::Init;
use candle_ops::{add_into, rms_norm_backward, rms_norm_forward};
use candle_parallel::{Gradient, GradientSink, ParamBuilder, Placement};

#[derive(Clone)]
pub(crate) struct Norm {
    weight: Tensor,
    eps: f64,
}

impl Norm {
    /// A norm of `width` values; `gradient` says whether the ranks use it on the same.
    pub fn new(width: usize, eps: f64, gradient: Gradient, vb: ParamBuilder) -> Result<Self> {
        let placement = Placement::Replicated(gradient);
        let weight = vb.get_placed(width, "weight", placement, Init::Const(1.0))?;
        Ok(Self { weight, eps })
    }

    /// (.., width) -> (.., width)
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        rms_norm_forward(xs, &self.weight, self.eps)
    }

    /// The gradient of `xs` from that of the output, plus that which reaches `xs` past the norm, `residual`.
    pub fn backward(
        &self,
        xs: &Tensor,
        dy: &Tensor,
        residual: Option<&Tensor>,
        gradients: &mut dyn GradientSink,
    ) -> Result<Tensor> {
        let is_trainable = self.weight.track_op();
        let (dx, dw) = rms_norm_backward(xs, &self.weight, dy, self.eps, residual, is_trainable)?;
        if let Some(dw) = dw {
            gradients.write(&self.weight, &mut |dst, add| add_into(dst, add, &dw))?;
        }
        Ok(dx)
    }

    pub fn weight(&self) -> &Tensor {
        &self.weight
    }
}
