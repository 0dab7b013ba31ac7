//! The adapter of one linear layer, beside that layer's own product.

use candle_core::{Result, Tensor};
use candle_nn::Init;
use candle_ops::{linear_forward, linear_forward_add, linear_input_grad, linear_weight_grad_into};

use crate::params::{ParamBuilder, TiledWeight};
use crate::pass::{Dropout, GradientSink, Pass};
use crate::placement::{Gradient, Placement, Shard};

/// s · dropout(x) Aᵀ Bᵀ, which is added to a linear layer's output. A begins uniform within ±1/√in, B with zeros.
///
/// Tensor-parallel ranks need no communication of their own: beside a column-parallel layer each has all of A and its rows of B,
/// beside a row-parallel one its columns of A and all of B, so that what it adds to outputs and to gradients of inputs is divided as
/// the layer's is.
#[derive(Clone)]
pub struct LowRank {
    /// (r, in), or this rank's columns.
    a: TiledWeight,
    /// (out, r), or this rank's rows.
    b: Tensor,
    scale: f64,
    dropout: Dropout,
}

/// What the backward pass computes first: the gradient of x Aᵀ.
pub(crate) struct InnerGrad {
    /// (.., r)
    grad: Tensor,
    /// Of the input, if some of it was dropped.
    mask: Option<Tensor>,
    /// What makes up for that, times s.
    scale: f64,
}

impl LowRank {
    /// The adapter of the column-parallel layer whose parameters are below `vb`, if it has one; `output` are the output features of
    /// this rank.
    ///
    /// # Errors
    /// Parameters that are missing or do not fit.
    pub fn column_parallel(
        in_dim: usize,
        output: &Shard,
        vb: &ParamBuilder,
    ) -> Result<Option<Self>> {
        // Each rank's rows of B give a summand.
        let a = Placement::Replicated(Gradient::Partial);
        Self::new(in_dim, a, output.global(), output.along(0).into(), vb)
    }

    /// The adapter of the row-parallel layer whose parameters are below `vb`, if it has one; `input` are the input features of
    /// this rank.
    ///
    /// # Errors
    /// As [`Self::column_parallel`].
    pub fn row_parallel(input: &Shard, out_dim: usize, vb: &ParamBuilder) -> Result<Option<Self>> {
        // Each rank has a summand of x Aᵀ.
        let b = Placement::Replicated(Gradient::Partial);
        Self::new(input.global(), input.along(1).into(), out_dim, b, vb)
    }

    fn new(
        in_dim: usize,
        a: Placement,
        out_dim: usize,
        b: Placement,
        vb: &ParamBuilder,
    ) -> Result<Option<Self>> {
        let Some(lora) = vb.lora() else {
            return Ok(None);
        };
        let bound = 1.0 / (in_dim as f64).sqrt();
        let uniform = Init::Uniform {
            lo: -bound,
            up: bound,
        };
        let features = a.shard().map(|shard| shard.held().clone());
        let dropout = Dropout::new(lora.dropout, vb.prefix(), features);
        let a = vb.get_adapter((lora.rank, in_dim), "lora_A.weight", a, uniform)?;
        let b = vb.get_adapter((out_dim, lora.rank), "lora_B.weight", b, Init::Const(0.0))?;
        Ok(Some(Self {
            a: a.into(),
            b,
            scale: lora.scale(),
            dropout,
        }))
    }

    /// A and B.
    pub fn weights(&self) -> [&Tensor; 2] {
        [self.a.tensor(), &self.b]
    }

    /// Whether the backward pass reads the input.
    pub fn is_trained(&self) -> bool {
        self.weights().into_iter().any(Tensor::track_op)
    }

    /// Bytes for each row that the gradient of A reads beside the layer's input, and that of B beside its output's gradient.
    pub(super) fn waiting_bytes(&self) -> [usize; 2] {
        let (input, inner) = self.a.row_bytes();
        // What was dropped makes an input of its own.
        let of_a = inner + if self.dropout.drops() { input } else { 0 };
        let bytes = |weight: &Tensor, bytes| if weight.track_op() { bytes } else { 0 };
        [bytes(self.a.tensor(), of_a), bytes(&self.b, inner)]
    }

    /// Whether the gradient of A reads the layer's input as it is.
    pub(super) fn shares_input(&self) -> bool {
        self.a.tensor().track_op() && !self.dropout.drops()
    }

    /// Whether B is trained.
    pub(super) fn trains_b(&self) -> bool {
        self.b.track_op()
    }

    /// x Aᵀ, (.., r), of an input of which some may have been dropped.
    fn inner(&self, xs: &Tensor) -> Result<Tensor> {
        linear_forward(xs, self.a.tensor(), None)
    }

    /// `ys` (.., out), a linear layer's output for `xs` (.., in), plus what the adapter adds.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn forward_add(&self, ys: &Tensor, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        let (inner, scale) = match self.dropout.mask(xs.dims(), xs, pass)? {
            None => (self.inner(xs)?, self.scale),
            Some((mask, factor)) => (self.inner(&(xs * mask)?)?, self.scale * factor),
        };
        linear_forward_add(ys, &(inner * scale)?, &self.b)
    }

    /// The gradient of x Aᵀ from `dy` (.., out), that of the layer's output.
    pub(crate) fn inner_grad(&self, dy: &Tensor, pass: &Pass) -> Result<InnerGrad> {
        let (_, leading) = dy.dims().split_last().ok_or_else(|| {
            candle_core::Error::msg("the gradient of a linear layer's output is a scalar")
        })?;
        let input = [leading, &[self.a.tensor().dim(1)?]].concat();
        let (mask, factor) = self.dropout.mask(&input, dy, pass)?.unzip();
        let scale = self.scale * factor.unwrap_or(1.0);
        Ok(InnerGrad {
            grad: (linear_input_grad(dy, &self.b)? * scale)?,
            mask,
            scale,
        })
    }

    /// The term `(dy, W)` that adds the adapter's part to the gradient of the layer's input, where nothing was dropped.
    pub(crate) fn input_term<'a>(
        &'a self,
        inner: &'a InnerGrad,
    ) -> Option<(&'a Tensor, &'a TiledWeight)> {
        inner.mask.is_none().then_some((&inner.grad, &self.a))
    }

    /// `dxs` (.., in), the gradient of the layer's input, with what is not in [`Self::input_term`].
    pub(crate) fn add_dropped(&self, dxs: Tensor, inner: &InnerGrad) -> Result<Tensor> {
        match &inner.mask {
            None => Ok(dxs),
            Some(mask) => dxs + (linear_input_grad(&inner.grad, self.a.tensor())? * mask)?,
        }
    }

    /// Puts the gradients of A and B; `xs` (.., in) is the layer's input, which may have been computed again, and `dy` (.., out) the gradient of its
    /// output. What reads A is computed now.
    pub(crate) fn put_gradients(
        &self,
        inner: &InnerGrad,
        xs: &Tensor,
        is_computed_again: bool,
        dy: &Tensor,
        gradients: &mut dyn GradientSink,
    ) -> Result<()> {
        let kept = match &inner.mask {
            None => xs.clone(),
            Some(mask) => (xs * mask)?,
        };
        let outer = self.b.track_op().then(|| self.inner(&kept)? * inner.scale);
        let grad = inner.grad.clone();
        let grad = move |dst: &Tensor, add| linear_weight_grad_into(dst, add, &grad, &kept);
        match is_computed_again {
            true => gradients.put_large(self.a.tensor(), Box::new(grad))?,
            false => gradients.put(self.a.tensor(), Box::new(grad))?,
        }
        let Some(outer) = outer.transpose()? else {
            return Ok(());
        };
        let dy = dy.clone();
        let grad = move |dst: &Tensor, add| linear_weight_grad_into(dst, add, &dy, &outer);
        gradients.put(&self.b, Box::new(grad))
    }
}
