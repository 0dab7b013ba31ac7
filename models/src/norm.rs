//! RMS norm (arXiv:1910.07467) of the last dim, with an explicit backward pass; every tensor-parallel rank has all of its weight.

use candle_core::{DType, Result, Tensor};
use candle_nn::Init;
use candle_ops::{rms_norm_backward, rms_norm_forward};
use candle_parallel::{Gradient, GradientSink, ParamBuilder, Placement};

use crate::config::ModelConfig;

#[derive(Clone)]
pub(crate) struct Norm {
    weight: Tensor,
    eps: f64,
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
        let factor = self.factor()?;
        let ys = rms_norm_forward(&xs.to_dtype(factor.dtype())?, &factor, self.eps)?;
        ys.to_dtype(xs.dtype())
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
        let factor = self.factor()?;
        let wide = |xs: &Tensor| xs.to_dtype(factor.dtype());
        let residual = residual.map(wide).transpose()?;
        let (x, dy, residual) = (wide(xs)?, wide(dy)?, residual.as_ref());
        let (dx, dw) = rms_norm_backward(&x, &factor, &dy, self.eps, residual, is_trainable)?;
        if let Some(dw) = dw {
            gradients.put_grad(&self.weight, dw)?;
        }
        dx.to_dtype(xs.dtype())
    }

    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// What the normed values are multiplied by: the weight, or 1 + weight in f32, and then everything is in f32 up to the result.
    fn factor(&self) -> Result<Tensor> {
        match self.adds_one {
            true => self.weight.detach().to_dtype(DType::F32)? + 1.0,
            false => Ok(self.weight.clone()),
        }
    }
}
