//! A linear layer whose input features are divided over tensor-parallel ranks: Y = Σ_r X_r · W_rᵀ + b
//! (arXiv:1909.08053, section 3).

use candle_core::{Result, Tensor};
use candle_nn::Init;
use candle_ops::linear_weight_grad_into;

use super::column_parallel_linear::{kept, put_bias_grad};
use super::input_grad::input_grad;
use super::layer::Layer;
use super::low_rank::LowRank;
use crate::params::{ParamBuilder, TiledWeight, WEIGHT_INIT};
use crate::pass::{GradientSink, Pass, Region, Tape};
use crate::placement::{Gradient, Placement, Shard};

/// Holds columns `r` of a global weight (out, in), the whole bias, and the same part of a low-rank adapter, if it has one.
#[derive(Clone)]
pub struct RowParallelLinear {
    weight: TiledWeight,
    bias: Option<Tensor>,
    low_rank: Option<LowRank>,
    region: Region,
}

/// A row-parallel layer of which each rank has an even part: (.., in / tp) -> (.., out).
///
/// # Errors
/// Fewer input features than ranks, and errors of [`ParamBuilder::get_placed`].
pub fn row_parallel_linear(
    in_dim: usize,
    out_dim: usize,
    bias: bool,
    region: impl Into<Region>,
    vb: ParamBuilder,
) -> Result<RowParallelLinear> {
    let region = region.into();
    let shard = Shard::even(1, in_dim, region.tp())?;
    row_parallel_linear_shard(shard, out_dim, bias, region, vb)
}

/// A row-parallel layer of which this rank has the input features `shard`: (.., shard) -> (.., out).
///
/// # Errors
/// Those of [`ParamBuilder::get_placed`].
pub fn row_parallel_linear_shard(
    shard: Shard,
    out_dim: usize,
    bias: bool,
    region: impl Into<Region>,
    vb: ParamBuilder,
) -> Result<RowParallelLinear> {
    let shard = shard.along(1);
    let low_rank = LowRank::row_parallel(&shard, out_dim, &vb)?;
    let weight = vb.get_linear((out_dim, shard.global()), "weight", shard, WEIGHT_INIT)?;
    // Its gradient is computed inside of the region, where each rank has all rows of it.
    let complete = Placement::Replicated(Gradient::Complete);
    let bias = match bias {
        true => Some(vb.get_placed(out_dim, "bias", complete, Init::Const(0.0))?),
        false => None,
    };
    Ok(RowParallelLinear {
        low_rank,
        ..RowParallelLinear::new(weight, bias, region)
    })
}

impl RowParallelLinear {
    /// The layer with the local weight (out, local_in) and the whole bias (out).
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
        }
    }

    /// Whether the backward pass reads the input: what is multiplied with it is trained.
    pub fn needs_input(&self) -> bool {
        let adapter = self.low_rank.as_ref();
        self.weight().track_op() || adapter.is_some_and(LowRank::is_trained)
    }

    /// The local weight, (out, local_in); its identity, but no values, where it comes [tile by tile](TiledWeight) or is frozen and
    /// [stays packed](crate::PackWeights).
    pub fn weight(&self) -> &Tensor {
        self.weight.tensor()
    }
}

impl RowParallelLinear {
    /// What stays of the layer if its input is kept, or if whoever has the layer computes it again for [`Self::backward_with`].
    pub fn tape_of(&self, is_computed_again: bool) -> Tape {
        let (input, output) = self.weight.row_bytes();
        let adapter = self.low_rank.as_ref();
        let [of_a, of_b] = adapter.map_or([0; 2], LowRank::waiting_bytes);
        let dy_of_others = self.bias.as_ref().is_some_and(Tensor::track_op)
            || adapter.is_some_and(LowRank::trains_b);
        let dy_of_weight = self.weight().track_op() && !dy_of_others;
        let bytes = |is_read, bytes| if is_read { bytes } else { 0 };
        let is_read = self.weight().track_op() || adapter.is_some_and(LowRank::shares_input);
        let of_input = of_a + bytes(is_read, input) + bytes(dy_of_weight, output);
        let waiting = of_b + bytes(dy_of_others, output);
        let tape = Tape {
            input,
            ..Tape::default()
        };
        match is_computed_again {
            true => Tape {
                waiting,
                waiting_large: of_input,
                ..tape
            },
            false => Tape {
                saved: bytes(self.needs_input(), input),
                waiting: waiting + of_input,
                ..tape
            },
        }
    }

    /// [`Layer::forward`] plus `residual` (.., out), as this rank has it outside of the [`Region`]. Residual and bias enter the sum over the ranks once,
    /// with the first rank's part; of a residual of which each rank has some rows it gets these afterwards.
    ///
    /// # Errors
    /// Shapes or types that do not fit, and what ends collectives.
    pub fn forward_add(
        &self,
        xs: &Tensor,
        residual: Option<&Tensor>,
        pass: &Pass,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let is_first = self.region.tp().rank() == 0;
        let bias = self.bias.as_ref().filter(|_| is_first);
        let after = residual.filter(|_| self.region.divides_rows());
        let residual = residual.filter(|_| is_first && after.is_none());
        let bias = bias.map(Tensor::detach);
        let partial = self.weight.linear(xs, bias.as_ref(), residual)?;
        let partial = match &self.low_rank {
            None => partial,
            Some(adapter) => adapter.forward_add(&partial, xs, pass)?,
        };
        let ys = self.region.leave(&partial)?;
        let ys = match after {
            Some(residual) => (ys + residual)?,
            None => ys,
        };
        Ok((ys, self.needs_input().then(|| xs.clone())))
    }

    /// [`Layer::backward`]: the gradient (.., local_in) of the input `xs`, from that of the output, `dy` (.., out). `xs` may be
    /// missing if the layer does not [need](Self::needs_input) it.
    ///
    /// # Errors
    /// A missing input that the layer needs, shapes that do not fit, and what ends collectives.
    pub fn backward_linear(
        &self,
        dy: &Tensor,
        xs: Option<&Tensor>,
        pass: &Pass,
        gradients: &mut dyn GradientSink,
    ) -> Result<Tensor> {
        self.backward_then(dy, pass, gradients, false, |dx| Ok((dx, xs.cloned())))
    }

    /// [`Self::backward_linear`] for an input that is computed again beside what follows from its gradient: `rest` gets the gradient of the
    /// input, and gives its own result and the input, which may be missing if the layer does not [need](Self::needs_input) it.
    ///
    /// # Errors
    /// What operations, `rest` and `gradients` return.
    pub fn backward_with<R>(
        &self,
        dy: &Tensor,
        pass: &Pass,
        gradients: &mut dyn GradientSink,
        rest: impl FnOnce(Tensor) -> Result<(R, Option<Tensor>)>,
    ) -> Result<R> {
        self.backward_then(dy, pass, gradients, true, rest)
    }

    /// `is_computed_again`: the forward pass has not kept the input, which the weight's gradient would.
    fn backward_then<R>(
        &self,
        dy: &Tensor,
        pass: &Pass,
        gradients: &mut dyn GradientSink,
        is_computed_again: bool,
        rest: impl FnOnce(Tensor) -> Result<(R, Option<Tensor>)>,
    ) -> Result<R> {
        let dy = &self.region.enter(dy, pass)?;
        let inner = self.low_rank.as_ref().map(|adapter| {
            let inner = adapter.inner_grad(dy, pass)?;
            Result::Ok((adapter, inner))
        });
        let inner = inner.transpose()?;
        let of_adapter = inner.iter();
        let of_adapter = of_adapter.filter_map(|(adapter, inner)| adapter.input_term(inner));
        let terms = std::iter::once((dy, &self.weight)).chain(of_adapter);
        let mut dx = input_grad(&terms.collect::<Vec<_>>())?;
        if let Some((adapter, inner)) = &inner {
            dx = adapter.add_dropped(dx, inner)?;
        }
        let (result, xs) = rest(dx)?;
        if self.weight().track_op() {
            let (dy, xs) = (dy.clone(), kept(xs.as_ref())?.clone());
            let grad = move |dst: &Tensor, add| linear_weight_grad_into(dst, add, &dy, &xs);
            match is_computed_again {
                true => gradients.put_large(self.weight(), Box::new(grad))?,
                false => gradients.put(self.weight(), Box::new(grad))?,
            }
        }
        put_bias_grad(self.bias.as_ref(), dy, gradients)?;
        if let Some((adapter, inner)) = inner.filter(|(adapter, _)| adapter.is_trained()) {
            adapter.put_gradients(&inner, kept(xs.as_ref())?, is_computed_again, dy, gradients)?;
        }
        Ok(result)
    }
}

impl Layer for RowParallelLinear {
    /// The input, if what reads it is trained.
    type Saved = Option<Tensor>;

    /// (.., local_in) -> (.., out), as the [`Region`] is left: without sequence parallelism the same on all ranks.
    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<(Tensor, Self::Saved)> {
        self.forward_add(xs, None, pass)
    }

    fn backward(
        &self,
        xs: Self::Saved,
        dy: &Tensor,
        pass: &Pass,
        gradients: &mut dyn GradientSink,
    ) -> Result<Option<Tensor>> {
        self.backward_linear(dy, xs.as_ref(), pass, gradients)
            .map(Some)
    }

    fn weights(&self) -> Vec<&Tensor> {
        let adapter = self.low_rank.iter().flat_map(LowRank::weights);
        let weights = std::iter::once(self.weight()).chain(&self.bias);
        weights.chain(adapter).collect()
    }

    fn tape(&self) -> Option<Tape> {
        Some(self.tape_of(false))
    }
}
