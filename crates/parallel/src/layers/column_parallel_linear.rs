//! A linear layer whose output features are divided over tensor-parallel ranks: Y_r = X · W_rᵀ + b_r
//! (arXiv:1909.08053, section 3).

use candle_comm::{Pending, ProcessGroup, ReduceOp};
use candle_core::{Module, Result, Tensor, bail};
use candle_nn::Init;
use candle_ops::{linear_bias_grad_into, linear_forward, linear_weight_grad_into};

use super::input_grad::input_grad;
use super::layer::{GradientSink, Layer, in_graph};
use crate::params::{ParamBuilder, Shard, TiledWeight, WEIGHT_INIT};

/// Holds rows `r` of a global weight (out, in), and the same part of the bias.
#[derive(Clone)]
pub struct ColumnParallelLinear {
    weight: TiledWeight,
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
    let weight = vb.get_tiled((out_dim, in_dim), "weight", shard.clone(), WEIGHT_INIT)?;
    let bias = match bias {
        true => Some(vb.get_placed(out_dim, "bias", shard, Init::Const(0.0))?),
        false => None,
    };
    Ok(ColumnParallelLinear::new(weight, bias, tp.clone()))
}

impl ColumnParallelLinear {
    /// The layer with the local weight (local_out, in) and bias (local_out).
    pub fn new(weight: impl Into<TiledWeight>, bias: Option<Tensor>, tp: ProcessGroup) -> Self {
        Self {
            weight: weight.into(),
            bias,
            tp,
            sums_input_grad: true,
        }
    }

    /// The layer without the sum of its input's gradient, for layers that share an input which comes from
    /// [`super::regions::copy_to_tensor_parallel_region`]: that region sums once for all of them.
    pub fn inside_region(self) -> Self {
        Self {
            sums_input_grad: false,
            ..self
        }
    }

    /// The local weight, (local_out, in); shape and identity, but no values, where it comes [tile by tile](TiledWeight).
    pub fn weight(&self) -> &Tensor {
        self.weight.tensor()
    }

    /// The local weight, (local_out, in), as it may be used: with ZeRO-3 perhaps tile by tile.
    pub fn tiled_weight(&self) -> &TiledWeight {
        &self.weight
    }
}

/// Backward pass of layers that share an input, each with the gradient (.., local_out) of its output: the gradient of the
/// input, summed over `tp`, which is under way while the weights' gradients are computed.
///
/// `xs` (.., in) is the input, which any of the layers saved; it may be missing if none of their weights is trained.
pub fn column_parallel_backward(
    layers: &[(&ColumnParallelLinear, &Tensor)],
    xs: Option<&Tensor>,
    tp: &ProcessGroup,
    gradients: &mut dyn GradientSink,
) -> Result<Tensor> {
    let terms: Vec<_> = layers
        .iter()
        .map(|(layer, dy)| (*dy, &layer.weight))
        .collect();
    let partial = input_grad(&terms)?;
    let is_summed_here = layers.iter().any(|(layer, _)| layer.sums_input_grad);
    if layers
        .iter()
        .any(|(layer, _)| layer.sums_input_grad != is_summed_here)
    {
        bail!(
            "layers that share an input are partly inside a region and partly not\nhint: make all of them inside_region, or none"
        );
    }
    let started = match is_summed_here {
        true => tp.start_all_reduce(&partial, ReduceOp::Sum)?,
        false => Pending::ready(partial),
    };
    for (layer, dy) in layers {
        layer.write_gradients(dy, xs, gradients)?;
    }
    started.wait()
}

impl ColumnParallelLinear {
    fn write_gradients(
        &self,
        dy: &Tensor,
        xs: Option<&Tensor>,
        gradients: &mut dyn GradientSink,
    ) -> Result<()> {
        gradients.write(self.weight(), &mut |dst, add| {
            linear_weight_grad_into(dst, add, dy, kept(xs)?)
        })?;
        match &self.bias {
            None => Ok(()),
            Some(bias) => {
                gradients.write(bias, &mut |dst, add| linear_bias_grad_into(dst, add, dy))
            }
        }
    }
}

impl Layer for ColumnParallelLinear {
    /// The input, if the weight that reads it is trained.
    type Saved = Option<Tensor>;

    /// (.., in) -> (.., local_out). The input is the same on all ranks.
    fn forward_saving(&self, xs: &Tensor) -> Result<(Tensor, Self::Saved)> {
        let bias = self.bias.as_ref().map(Tensor::detach);
        let ys = self.weight.concat(|rows, tile| {
            let bias = bias.as_ref();
            let bias = bias.map(|bias| bias.narrow(0, rows.start, rows.len()));
            linear_forward(xs, tile, bias.transpose()?.as_ref())
        })?;
        Ok((ys, self.weight().track_op().then(|| xs.clone())))
    }

    fn backward(
        &self,
        xs: Self::Saved,
        dy: &Tensor,
        gradients: &mut dyn GradientSink,
    ) -> Result<Option<Tensor>> {
        column_parallel_backward(&[(self, dy)], xs.as_ref(), &self.tp, gradients).map(Some)
    }

    fn weights(&self) -> Vec<&Tensor> {
        std::iter::once(self.weight()).chain(&self.bias).collect()
    }
}

impl Module for ColumnParallelLinear {
    /// (.., in) -> (.., local_out) in candle's graph; backward sums the input's gradient over the ranks.
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        in_graph(self, xs)
    }
}

/// The input of a layer whose weight is trained.
pub(super) fn kept(xs: Option<&Tensor>) -> Result<&Tensor> {
    match xs {
        Some(xs) => Ok(xs),
        None => bail!("a linear layer with a trainable weight got no input in its backward pass"),
    }
}
