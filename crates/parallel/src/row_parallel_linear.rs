//! A linear layer whose input features are divided over tensor-parallel ranks: Y = Σ_r X_r · W_rᵀ + b
//! (arXiv:1909.08053, section 3).

use candle_comm::{ProcessGroup, ReduceOp};
use candle_core::{Module, Result, Tensor};
use candle_nn::Init;
use candle_ops::{
    linear_bias_grad_into, linear_forward, linear_forward_add, linear_input_grad,
    linear_weight_grad, linear_weight_grad_into, with_backward2,
};

use crate::column_parallel_linear::kept;
use crate::gradients::Gradients;
use crate::param_builder::{ParamBuilder, WEIGHT_INIT};
use crate::shard::Shard;

/// Holds columns `r` of a global weight (out, in), and the whole bias.
#[derive(Clone)]
pub struct RowParallelLinear {
    weight: Tensor,
    bias: Option<Tensor>,
    tp: ProcessGroup,
}

/// A row-parallel layer of which each rank has an even part: (.., in / tp) -> (.., out).
pub fn row_parallel_linear(
    in_dim: usize,
    out_dim: usize,
    bias: bool,
    tp: &ProcessGroup,
    vb: ParamBuilder,
) -> Result<RowParallelLinear> {
    row_parallel_linear_shard(Shard::even(1, in_dim, tp)?, out_dim, bias, tp, vb)
}

/// A row-parallel layer of which this rank has the input features `shard`: (.., shard) -> (.., out).
pub fn row_parallel_linear_shard(
    shard: Shard,
    out_dim: usize,
    bias: bool,
    tp: &ProcessGroup,
    vb: ParamBuilder,
) -> Result<RowParallelLinear> {
    let shard = shard.along(1);
    let weight = vb.get_shard((out_dim, shard.global), "weight", shard, WEIGHT_INIT)?;
    let bias = match bias {
        true => Some(vb.get(out_dim, "bias", Init::Const(0.0))?),
        false => None,
    };
    Ok(RowParallelLinear::new(weight, bias, tp.clone()))
}

impl RowParallelLinear {
    /// The layer with the local weight (out, local_in) and the whole bias (out).
    pub fn new(weight: Tensor, bias: Option<Tensor>, tp: ProcessGroup) -> Self {
        Self { weight, bias, tp }
    }

    /// The local weight, (out, local_in).
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }
}

impl RowParallelLinear {
    /// `residual` (.., out) + the layer's output for `xs` (.., local_in), outside candle's graph, for a backward pass by hand
    /// with [`Self::backward`]. Residual and bias enter the sum over the ranks once, with the first rank's part.
    pub fn forward_add_detached(&self, xs: &Tensor, residual: &Tensor) -> Result<Tensor> {
        let partial = match self.tp.rank() {
            0 => linear_forward_add(residual, xs, &self.weight)?,
            _ => linear_forward(xs, &self.weight, None)?,
        };
        let partial = match &self.bias {
            Some(bias) if self.tp.rank() == 0 => partial.broadcast_add(&bias.detach())?,
            _ => partial,
        };
        self.tp.all_reduce(&partial, ReduceOp::Sum)
    }

    /// Whether the backward pass reads the layer's input: only the gradient of a trainable weight does.
    pub fn needs_input(&self) -> bool {
        self.weight.track_op()
    }

    /// The gradient (.., local_in) of the input `xs`, from that of the output, `dy` (.., out); writes the gradients of weight
    /// and bias. The input may be missing if [`Self::needs_input`] is false.
    pub fn backward(
        &self,
        dy: &Tensor,
        xs: Option<&Tensor>,
        gradients: &mut Gradients,
    ) -> Result<Tensor> {
        gradients.write(&self.weight, |dst, add| {
            linear_weight_grad_into(dst, add, dy, kept(xs)?)
        })?;
        if let Some(bias) = &self.bias {
            gradients.write(bias, |dst, add| linear_bias_grad_into(dst, add, dy))?;
        }
        linear_input_grad(dy, &self.weight)
    }
}

impl Module for RowParallelLinear {
    /// (.., local_in) -> (.., out), the same on all ranks. The bias is added once, after the sum over the ranks.
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let (x, w) = (xs.detach(), self.weight.detach());
        let partial = linear_forward(&x, &w, None)?;
        let sum = self.tp.all_reduce(&partial, ReduceOp::Sum)?;
        let (input_tracked, weight_tracked) = (xs.track_op(), self.weight.track_op());
        let out = with_backward2(xs, &self.weight, sum, "row_parallel_linear", move |grad| {
            let dx = match input_tracked {
                true => Some(linear_input_grad(grad, &w)?),
                false => None,
            };
            let dw = match weight_tracked {
                true => Some(linear_weight_grad(grad, &x)?),
                false => None,
            };
            Ok((dx, dw))
        })?;
        match &self.bias {
            None => Ok(out),
            Some(bias) => out.broadcast_add(bias),
        }
    }
}
