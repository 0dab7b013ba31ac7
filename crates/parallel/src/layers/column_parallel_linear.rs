//! A linear layer whose output features are divided over tensor-parallel ranks: Y_r = X · W_rᵀ + b_r
//! (arXiv:1909.08053, section 3).

use candle_comm::Pending;
use candle_core::{Result, Tensor, bail};
use candle_nn::Init;
use candle_ops::{linear_bias_grad_into, linear_weight_grad_into};

use super::input_grad::input_grad;
use super::layer::Layer;
use super::low_rank::LowRank;
use crate::params::{ParamBuilder, TiledWeight, WEIGHT_INIT};
use crate::pass::{GradientSink, Pass, Region, Tape};
use crate::placement::Shard;

/// Holds rows `r` of a global weight (out, in), and the same part of the bias and of a low-rank adapter, if it has one.
#[derive(Clone)]
pub struct ColumnParallelLinear {
    weight: TiledWeight,
    bias: Option<Tensor>,
    low_rank: Option<LowRank>,
    region: Region,
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
    let bias = match bias {
        true => Some(vb.get_placed(out_dim, "bias", shard, Init::Const(0.0))?),
        false => None,
    };
    Ok(ColumnParallelLinear {
        low_rank,
        ..ColumnParallelLinear::new(weight, bias, region)
    })
}

impl ColumnParallelLinear {
    /// The layer with the local weight (local_out, in) and bias (local_out).
    pub fn new(
        weight: impl Into<TiledWeight>,
        bias: Option<Tensor>,
        region: impl Into<Region>,
    ) -> Self {
        Self {
            weight: weight.into(),
            bias,
            low_rank: None,
            region: region.into(),
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

    /// The local weight, (local_out, in); its identity, but no values, where it comes [tile by tile](TiledWeight) or is frozen and
    /// [stays packed](crate::PackWeights).
    pub fn weight(&self) -> &Tensor {
        self.weight.tensor()
    }

    /// Whether the backward pass reads the input: what is multiplied with it is trained.
    pub fn needs_input(&self) -> bool {
        let adapter = self.low_rank.as_ref();
        self.weight().track_op() || adapter.is_some_and(LowRank::is_trained)
    }

    /// The local weight, (local_out, in), as it may be used: with ZeRO-3 perhaps tile by tile.
    pub fn tiled_weight(&self) -> &TiledWeight {
        &self.weight
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
    Ok(first.sums_input_grad.then_some(&first.region))
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
    let adapters = layers.iter();
    let adapters = adapters.map(|(layer, dy)| {
        let adapter = layer.low_rank.as_ref();
        adapter
            .map(|adapter| Ok((adapter, adapter.inner_grad(dy, pass)?)))
            .transpose()
    });
    let adapters: Vec<_> = adapters.collect::<Result<_>>()?;
    let terms = layers.iter().map(|(layer, dy)| (*dy, &layer.weight));
    let of_adapters = adapters.iter().flatten();
    let of_adapters = of_adapters.filter_map(|(adapter, inner)| adapter.input_term(inner));
    let mut partial = input_grad(&terms.chain(of_adapters).collect::<Vec<_>>())?;
    for (adapter, inner) in adapters.iter().flatten() {
        partial = adapter.add_dropped(partial, inner)?;
    }
    let xs = entering.map(Pending::wait).transpose()?;
    let xs = xs.as_ref();
    let started = match border {
        Some(region) => region.start_leave(&partial)?,
        None => Pending::ready(partial),
    };
    for ((layer, dy), adapter) in layers.iter().zip(&adapters) {
        layer.put_gradients(dy, xs, gradients)?;
        if let Some((adapter, inner)) = adapter.as_ref().filter(|(adapter, _)| adapter.is_trained())
        {
            adapter.put_gradients(inner, kept(xs)?, false, dy, gradients)?;
        }
    }
    started.wait()
}

/// What stays of layers that share an input, which any of them keeps.
pub fn column_parallel_tape(layers: &[&ColumnParallelLinear]) -> Tape {
    let Some(first) = layers.first() else {
        return Tape::default();
    };
    let (whole, _) = first.weight.row_bytes();
    let input = match first.sums_input_grad {
        true => first.region.bytes_outside(whole),
        false => whole,
    };
    let of_layers: usize = layers.iter().map(|layer| layer.waiting_bytes()).sum();
    let bytes = |is_there, bytes| if is_there { bytes } else { 0 };
    let is_kept = layers.iter().any(|layer| layer.needs_input());
    let is_read = layers.iter().any(|layer| {
        let adapter = layer.low_rank.as_ref();
        layer.weight().track_op() || adapter.is_some_and(LowRank::shares_input)
    });
    Tape {
        input,
        saved: bytes(is_kept, input),
        waiting: bytes(is_read, whole) + of_layers,
        ..Tape::default()
    }
}

impl ColumnParallelLinear {
    /// Bytes for each row that the gradients of the weights read beside the input.
    fn waiting_bytes(&self) -> usize {
        let adapter = self.low_rank.as_ref();
        let reads_dy = self.weight().track_op()
            || self.bias.as_ref().is_some_and(Tensor::track_op)
            || adapter.is_some_and(LowRank::trains_b);
        let (_, dy) = self.weight.row_bytes();
        let [of_a, of_b] = adapter.map_or([0; 2], LowRank::waiting_bytes);
        of_a + of_b + if reads_dy { dy } else { 0 }
    }

    /// The output for an input inside the region.
    fn product(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        let bias = self.bias.as_ref().map(Tensor::detach);
        let ys = self.weight.linear(xs, bias.as_ref(), None)?;
        match &self.low_rank {
            None => Ok(ys),
            Some(adapter) => adapter.forward_add(&ys, xs, pass),
        }
    }

    fn put_gradients(
        &self,
        dy: &Tensor,
        xs: Option<&Tensor>,
        gradients: &mut dyn GradientSink,
    ) -> Result<()> {
        if self.weight().track_op() {
            let (dy, xs) = (dy.clone(), kept(xs)?.clone());
            let grad = move |dst: &Tensor, add| linear_weight_grad_into(dst, add, &dy, &xs);
            gradients.put(self.weight(), Box::new(grad))?;
        }
        put_bias_grad(self.bias.as_ref(), dy, gradients)
    }
}

/// Puts the gradient of a linear layer's bias (out), if it has one, from that of its output, `dy` (.., out).
pub(super) fn put_bias_grad(
    bias: Option<&Tensor>,
    dy: &Tensor,
    gradients: &mut dyn GradientSink,
) -> Result<()> {
    let Some(bias) = bias else { return Ok(()) };
    let dy = dy.clone();
    let grad = move |dst: &Tensor, add| linear_bias_grad_into(dst, add, &dy);
    gradients.put(bias, Box::new(grad))
}

impl Layer for ColumnParallelLinear {
    /// The input, if what reads it is trained.
    type Saved = Option<Tensor>;

    /// (.., in) -> (.., local_out). The input is what this rank has outside of the [`Region`]: without sequence parallelism the same on all ranks.
    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<(Tensor, Self::Saved)> {
        let ys = match self.sums_input_grad {
            true => self.product(&self.region.enter(xs, pass)?, pass)?,
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
        let adapter = self.low_rank.iter().flat_map(LowRank::weights);
        let weights = std::iter::once(self.weight()).chain(&self.bias);
        weights.chain(adapter).collect()
    }

    fn tape(&self) -> Option<Tape> {
        Some(column_parallel_tape(&[self]))
    }
}

/// The input of a layer whose weight is trained.
pub(super) fn kept(xs: Option<&Tensor>) -> Result<&Tensor> {
    match xs {
        Some(xs) => Ok(xs),
        None => bail!(
            "a linear layer with a trainable weight or adapter got no input in its backward pass"
        ),
    }
}
