//! A linear layer whose output features are divided over tensor-parallel ranks: Y_r = X · W_rᵀ + b_r
//! (arXiv:1909.08053, section 3).

use candle_comm::{ProcessGroup, ReduceOp};
use candle_core::{Module, Result, Tensor, bail};
use candle_nn::Init;
use candle_ops::{
    linear_bias_grad, linear_bias_grad_into, linear_forward, linear_input_grad,
    linear_input_grad_sum, linear_weight_grad, linear_weight_grad_into, with_backward2,
    with_backward3,
};

use crate::gradients::Gradients;
use crate::param_builder::{ParamBuilder, WEIGHT_INIT};
use crate::shard::Shard;

/// Holds rows `r` of a global weight (out, in), and the same part of the bias.
#[derive(Clone)]
pub struct ColumnParallelLinear {
    weight: Tensor,
    bias: Option<Tensor>,
    tp: ProcessGroup,
    sums_input_grad: bool,
}

/// A column-parallel layer of which each rank has an even part: (.., in) -> (.., out / tp).
pub fn column_parallel_linear(
    in_dim: usize,
    out_dim: usize,
    bias: bool,
    tp: &ProcessGroup,
    vb: ParamBuilder,
) -> Result<ColumnParallelLinear> {
    let shard = Shard::even(0, out_dim, tp)?;
    column_parallel_linear_shard(in_dim, shard, bias, tp, vb)
}

/// A column-parallel layer of which this rank has the output features `shard`: (.., in) -> (.., shard).
pub fn column_parallel_linear_shard(
    in_dim: usize,
    shard: Shard,
    bias: bool,
    tp: &ProcessGroup,
    vb: ParamBuilder,
) -> Result<ColumnParallelLinear> {
    let out_dim = shard.global;
    let weight = vb.get_shard((out_dim, in_dim), "weight", shard.clone(), WEIGHT_INIT)?;
    let bias = match bias {
        true => Some(vb.get_shard(out_dim, "bias", shard, Init::Const(0.0))?),
        false => None,
    };
    Ok(ColumnParallelLinear::new(weight, bias, tp.clone()))
}

impl ColumnParallelLinear {
    /// The layer with the local weight (local_out, in) and bias (local_out).
    pub fn new(weight: Tensor, bias: Option<Tensor>, tp: ProcessGroup) -> Self {
        Self {
            weight,
            bias,
            tp,
            sums_input_grad: true,
        }
    }

    /// The layer without the sum of its input's gradient, for layers that share an input which comes from
    /// [`crate::regions::copy_to_tensor_parallel_region`]: that region sums once for all of them.
    pub fn inside_region(self) -> Self {
        Self {
            sums_input_grad: false,
            ..self
        }
    }

    /// The local weight, (local_out, in).
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }
}

impl ColumnParallelLinear {
    /// (.., in) -> (.., local_out) outside candle's graph, for a backward pass by hand with [`column_parallel_backward`].
    pub fn forward_detached(&self, xs: &Tensor) -> Result<Tensor> {
        linear_forward(xs, &self.weight, self.bias.as_ref())
    }

    /// Whether the backward pass reads the layer's input: only the gradient of a trainable weight does.
    pub fn needs_input(&self) -> bool {
        self.weight.track_op()
    }

    /// Writes the gradients of weight and bias; `dy` (.., local_out) is that of the output for the input `xs` (.., in), which
    /// may be missing if [`Self::needs_input`] is false.
    pub fn write_gradients(
        &self,
        dy: &Tensor,
        xs: Option<&Tensor>,
        gradients: &mut Gradients,
    ) -> Result<()> {
        gradients.write(&self.weight, |dst, add| {
            linear_weight_grad_into(dst, add, dy, kept(xs)?)
        })?;
        match &self.bias {
            None => Ok(()),
            Some(bias) => gradients.write(bias, |dst, add| linear_bias_grad_into(dst, add, dy)),
        }
    }
}

/// Backward pass of layers that share the input `xs` (.., in), each with the gradient (.., local_out) of its output: the
/// gradient of the input, summed over `tp`, which is under way while the weights' gradients are computed. The input may be
/// missing if no layer [needs](ColumnParallelLinear::needs_input) it.
pub fn column_parallel_backward(
    layers: &[(&ColumnParallelLinear, &Tensor)],
    xs: Option<&Tensor>,
    tp: &ProcessGroup,
    gradients: &mut Gradients,
) -> Result<Tensor> {
    let terms: Vec<_> = layers
        .iter()
        .map(|(layer, dy)| (*dy, &layer.weight))
        .collect();
    let started = tp.start_all_reduce(&linear_input_grad_sum(&terms)?, ReduceOp::Sum)?;
    for (layer, dy) in layers {
        layer.write_gradients(dy, xs, gradients)?;
    }
    started.wait()
}

/// The input of a layer whose weight is trained.
pub(crate) fn kept(xs: Option<&Tensor>) -> Result<&Tensor> {
    match xs {
        Some(xs) => Ok(xs),
        None => bail!(
            "a linear layer with a trainable weight got no input in its backward pass\nhint: keep the input if needs_input() \
             says so"
        ),
    }
}

impl Module for ColumnParallelLinear {
    /// (.., in) -> (.., local_out). The input is the same on all ranks; backward sums its gradient over them, and
    /// computes the weight's while that sum is under way.
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let name = "column_parallel_linear";
        let (x, w) = (xs.detach(), self.weight.detach());
        let b = self.bias.as_ref().map(Tensor::detach);
        let out = linear_forward(&x, &w, b.as_ref())?;
        let backward = Backward {
            input_tracked: xs.track_op(),
            weight_tracked: self.weight.track_op(),
            bias_tracked: self.bias.as_ref().is_some_and(Tensor::track_op),
            x,
            w,
            sum_over: self.sums_input_grad.then(|| self.tp.clone()),
        };
        match &self.bias {
            None => with_backward2(xs, &self.weight, out, name, move |grad| {
                let (dx, dw, _) = backward.run(grad)?;
                Ok((dx, dw))
            }),
            Some(bias) => with_backward3(xs, &self.weight, bias, out, name, move |grad| {
                backward.run(grad)
            }),
        }
    }
}

struct Backward {
    x: Tensor,
    w: Tensor,
    /// The ranks over which the input's gradient is summed here.
    sum_over: Option<ProcessGroup>,
    input_tracked: bool,
    weight_tracked: bool,
    bias_tracked: bool,
}

impl Backward {
    fn run(&self, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let mut dx = match self.input_tracked {
            true => Some(linear_input_grad(grad, &self.w)?),
            false => None,
        };
        let started = match (&dx, &self.sum_over) {
            (Some(partial), Some(tp)) => Some(tp.start_all_reduce(partial, ReduceOp::Sum)?),
            _ => None,
        };
        let dw = match self.weight_tracked {
            true => Some(linear_weight_grad(grad, &self.x)?),
            false => None,
        };
        let db = match self.bias_tracked {
            true => Some(linear_bias_grad(grad)?),
            false => None,
        };
        if let Some(started) = started {
            dx = Some(started.wait()?);
        }
        Ok((dx, dw, db))
    }
}
