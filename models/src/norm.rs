//! RMS norm (arXiv:1910.07467) of the last dim, with an explicit backward pass; every tensor-parallel rank has all of its weight.

use candle_core::{DType, Result, Tensor};
use candle_nn::Init;
use candle_ops::{add_into, rms_norm_backward, rms_norm_forward};
use candle_parallel::{Gradient, GradientSink, ParamBuilder, Placement};

use crate::config::ModelConfig;

#[derive(Clone)]
pub(crate) struct Norm {
    weight: Tensor,
    eps: f64,
    /// The factor is 1 + weight, a sum of f32, and so is all that it is used on.
    adds_one: bool,
}

impl Norm {
    /// A norm of `width` values; `gradient` says whether the ranks use it on the same.
    pub fn new(
        width: usize,
        config: &ModelConfig,
        gradient: Gradient,
        vb: ParamBuilder,
    ) -> Result<Self> {
        let placement = Placement::Replicated(gradient);
        let init = Init::Const(if config.norm_adds_one { 0.0 } else { 1.0 });
        Ok(Self {
            weight: vb.get_placed(width, "weight", placement, init)?,
            eps: config.rms_norm_eps,
            adds_one: config.norm_adds_one,
        })
    }

    /// (.., width) -> (.., width)
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        if !self.adds_one {
            return rms_norm_forward(xs, &self.weight, self.eps);
        }
        rms_norm_forward(&wide(xs)?, &self.one_plus_weight()?, self.eps)?.to_dtype(xs.dtype())
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
        let (dx, dw) = if self.adds_one {
            let (weight, residual) = (self.one_plus_weight()?, residual.map(wide).transpose()?);
            let (x, dy, residual) = (wide(xs)?, wide(dy)?, residual.as_ref());
            let (dx, dw) = rms_norm_backward(&x, &weight, &dy, self.eps, residual, is_trainable)?;
            (dx.to_dtype(xs.dtype())?, dw)
        } else {
            rms_norm_backward(xs, &self.weight, dy, self.eps, residual, is_trainable)?
        };
        if let Some(dw) = dw {
            gradients.write(&self.weight, &mut |dst, add| add_into(dst, add, &dw))?;
        }
        Ok(dx)
    }

    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    fn one_plus_weight(&self) -> Result<Tensor> {
        wide(&self.weight.detach())? + 1.0
    }
}

fn wide(xs: &Tensor) -> Result<Tensor> {
    xs.to_dtype(DType::F32)
}
