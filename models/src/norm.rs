//! RMS norm (arXiv:1910.07467) with an explicit backward pass; every tensor-parallel rank has all of it.

use candle_core::{Result, Tensor};
use candle_nn::Init;
use candle_ops::{add_into, rms_norm_backward, rms_norm_forward};
use candle_parallel::{GradientSink, ParamBuilder};

use crate::config::ModelConfig;

#[derive(Clone)]
pub(crate) struct Norm {
    weight: Tensor,
    eps: f64,
}

impl Norm {
    pub fn new(config: &ModelConfig, vb: ParamBuilder) -> Result<Self> {
        Ok(Self {
            weight: vb.get(config.hidden_size, "weight", Init::Const(1.0))?,
            eps: config.rms_norm_eps,
        })
    }

    /// (.., hidden) -> (.., hidden)
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
