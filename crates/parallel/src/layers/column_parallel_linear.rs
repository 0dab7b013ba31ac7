//! A linear layer whose output features are divided over tensor-parallel ranks: Y_r = X · W_rᵀ + b_r
//! (arXiv:1909.08053, section 3).

use candle_comm::Pending;
use candle_core::{Result, Tensor, bail};
use candle_nn::Init;

use super::layer::Layer;
use super::linear::{Linear, input_grad};
use super::low_rank::LowRank;
use crate::params::{ParamBuilder, TiledWeight, WEIGHT_INIT};
use crate::pass::{GradientSink, Pass, Region, Tape};
use crate::placement::Shard;

/// Holds rows `r` of a global weight (out, in), and the same part of the bias and of a low-rank adapter, if it has one.
#[derive(Clone)]
pub struct ColumnParallelLinear {
    linear: Linear,
    sums_input_grad: bool,
}

/// A column-parallel layer of which each rank has an even part: (.., in) -> (.., out / tp).
///
/// # Errors
/// Fewer output features than ranks, and errors of [`ParamBuilder::get_placed`].
pub fn column_parallel_linear(
    in_dim: usize,
    out_dim: usize,
    bias: bool,
    region: impl Into<Region>,
    vb: ParamBuilder,
) -> Result<ColumnParallelLinear> {
    let region = region.into();
    let shard = Shard::even(0, out_dim, region.tp())?;
    column_parallel_linear_shard(in_dim, shard, bias, region, vb)
}

/// A column-parallel layer of which this rank has the output features `shard`: (.., in) -> (.., shard).
///
/// # Errors
/// Those of [`ParamBuilder::get_placed`].
pub fn column_parallel_linear_shard(
    in_dim: usize,
    shard: Shard,
    bias: bool,
    region: impl Into<Region>,
    vb: ParamBuilder,
) -> Result<ColumnParallelLinear> {
    let out_dim = shard.global();
    let weight = vb.get_linear((out_dim, in_dim), "weight", shard.clone(), WEIGHT_INIT)?;
    let low_rank = LowRank::column_parallel(in_dim, &shard, &vb)?;
    let bias = bias.then(|| vb.get_placed(out_dim, "bias", shard, Init::Const(0.0)));
    let mut layer = ColumnParallelLinear::new(weight, bias.transpose()?, region);
    layer.linear.low_rank = low_rank;
    Ok(layer)
}

impl ColumnParallelLinear {
    /// The layer with the local weight (local_out, in) and bias (local_out).
    pub fn new(
        weight: impl Into<TiledWeight>,
        bias: Option<Tensor>,
        region: impl Into<Region>,
    ) -> Self {
        Self {
            linear: Linear {
                weight: weight.into(),
                bias,
                low_rank: None,
                region: region.into(),
            },
            sums_input_grad: true,
        }
    }

    /// The layer without a border of its own: its input is inside the region already, from
    /// [`super::regions::copy_to_tensor_parallel_region`] for example, which sums its gradient once for all layers that share it.
    pub fn inside_region(self) -> Self {
        Self {
            sums_input_grad: false,
            ..self
        }
    }

    /// The local weight, (local_out, in); its identity, but no values, where it comes [tile by tile](TiledWeight).
    pub fn weight(&self) -> &Tensor {
        self.linear.weight()
    }

    /// Whether the backward pass reads the input: what is multiplied with it is trained.
    pub fn needs_input(&self) -> bool {
        self.linear.needs_input()
    }

    /// The local weight, (local_out, in), as it may be used: with ZeRO-3 perhaps tile by tile.
    pub fn tiled_weight(&self) -> &TiledWeight {
        &self.linear.weight
    }

    /// The output for an input inside the region.
    fn product(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        let linear = &self.linear;
        linear.product(xs, linear.bias.as_ref(), None, pass)
    }
}

/// Forward pass of layers that share an input: what each gives, (.., local_out). `xs` (.., in) is what this rank has outside of the layers'
/// [`Region`], which is entered once.
///
/// # Errors
/// No layers, shapes that do not fit, and what ends collectives.
pub fn column_parallel_forward(
    layers: &[&ColumnParallelLinear],
    xs: &Tensor,
    pass: &Pass,
) -> Result<Vec<Tensor>> {
    let region = shared_border(layers)?;
    let xs = match region {
        Some(region) => region.enter(xs, pass)?,
        None => xs.clone(),
    };
    let outputs = layers.iter().map(|layer| layer.product(&xs, pass));
    outputs.collect()
}

/// The border that these layers have in common; `None`: they are inside a region.
fn shared_border<'a>(layers: &[&'a ColumnParallelLinear]) -> Result<Option<&'a Region>> {
    let Some(first) = layers.first() else {
        bail!("a pass of no layers; expected at least one");
    };
    if layers
        .iter()
        .any(|layer| layer.sums_input_grad != first.sums_input_grad)
    {
        bail!(
            "layers that share an input are partly inside a region and partly not\nhint: make all of them inside_region, or none"
        );
    }
    Ok(first.sums_input_grad.then_some(&first.linear.region))
}

/// Backward pass of layers that share an input, each with the gradient (.., local_out) of its output: the gradient of the
/// input as this rank has it outside of the layers' [`Region`], whose sum is under way while the weights' gradients are computed.
///
/// `xs` (.., in) is the input, which any of the layers saved; it may be missing if none of them
/// [needs](ColumnParallelLinear::needs_input) it.
///
/// # Errors
/// No layers, a missing input that one of them needs, shapes that do not fit, and what ends collectives.
pub fn column_parallel_backward(
    layers: &[(&ColumnParallelLinear, &Tensor)],
    xs: Option<&Tensor>,
    pass: &Pass,
    gradients: &mut dyn GradientSink,
) -> Result<Tensor> {
    let all: Vec<_> = layers.iter().map(|(layer, _)| *layer).collect();
    let border = shared_border(&all)?;
    // Under way while what follows from the outputs is computed.
    let entering = match (border, xs) {
        (Some(region), Some(xs)) => Some(region.start_enter(xs, pass)?),
        (None, Some(xs)) => Some(Pending::ready(xs.clone())),
        (_, None) => None,
    };
    let linears: Vec<_> = layers.iter().map(|(it, dy)| (&it.linear, *dy)).collect();
    let (partial, inner) = input_grad(&linears, pass)?;
    let xs = entering.map(Pending::wait).transpose()?;
    let started = match border {
        Some(region) => region.start_leave(&partial)?,
        None => Pending::ready(partial),
    };
    for ((linear, dy), inner) in linears.into_iter().zip(&inner) {
        linear.put_gradients(dy, inner.as_ref(), xs.as_ref(), false, gradients)?;
    }
    started.wait()
}

/// What stays of layers that share an input, which any of them keeps.
pub fn column_parallel_tape(layers: &[&ColumnParallelLinear]) -> Tape {
    let Some(first) = layers.first() else {
        return Tape::default();
    };
    let (whole, _) = first.linear.weight.row_bytes();
    let input = match first.sums_input_grad {
        true => first.linear.region.bytes_outside(whole),
        false => whole,
    };
    let of_layers = layers.iter().flat_map(|it| it.linear.waiting_bytes());
    let bytes = |is_there, bytes| if is_there { bytes } else { 0 };
    let is_read = layers.iter().any(|layer| layer.linear.reads_input());
    Tape {
        input,
        saved: bytes(layers.iter().any(|layer| layer.needs_input()), input),
        waiting: bytes(is_read, whole) + of_layers.sum::<usize>(),
        ..Tape::default()
    }
}

impl Layer for ColumnParallelLinear {
    /// The input, if what reads it is trained.
    type Saved = Option<Tensor>;

    /// (.., in) -> (.., local_out). The input is what this rank has outside of the [`Region`]: without sequence parallelism the same on all ranks.
    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<(Tensor, Self::Saved)> {
        let ys = match self.sums_input_grad {
            true => self.product(&self.linear.region.enter(xs, pass)?, pass)?,
            false => self.product(xs, pass)?,
        };
        Ok((ys, self.needs_input().then(|| xs.clone())))
    }

    fn backward(
        &self,
        xs: Self::Saved,
        dy: &Tensor,
        pass: &Pass,
        gradients: &mut dyn GradientSink,
    ) -> Result<Option<Tensor>> {
        column_parallel_backward(&[(self, dy)], xs.as_ref(), pass, gradients).map(Some)
    }

    fn weights(&self) -> Vec<&Tensor> {
        self.linear.weights()
    }

    fn tape(&self) -> Option<Tape> {
        Some(column_parallel_tape(&[self]))
    }
}
