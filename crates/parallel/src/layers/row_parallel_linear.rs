//! A linear layer whose input features are divided over tensor-parallel ranks: Y = Σ_r X_r · W_rᵀ + b
//! (arXiv:1909.08053, section 3).

use candle_core::{Result, Tensor};
use candle_nn::Init;

use super::layer::Layer;
use super::linear::{Linear, input_grad};
use super::low_rank::LowRank;
use crate::params::{ParamBuilder, TiledWeight, WEIGHT_INIT};
use crate::pass::{GradientSink, Pass, Region, Tape};
use crate::placement::{Gradient, Placement, Shard};

/// Holds columns `r` of a global weight (out, in), the whole bias, and the same part of a low-rank adapter, if it has one.
#[derive(Clone)]
pub struct RowParallelLinear(Linear);

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
    let bias = bias.then(|| vb.get_placed(out_dim, "bias", complete, Init::Const(0.0)));
    let mut layer = RowParallelLinear::new(weight, bias.transpose()?, region);
    layer.0.low_rank = low_rank;
    Ok(layer)
}

impl RowParallelLinear {
    /// The layer with the local weight (out, local_in) and the whole bias (out).
    pub fn new(
        weight: impl Into<TiledWeight>,
        bias: Option<Tensor>,
        region: impl Into<Region>,
    ) -> Self {
        Self(Linear {
            weight: weight.into(),
            bias,
            low_rank: None,
            region: region.into(),
        })
    }

    /// Whether the backward pass reads the input: what is multiplied with it is trained.
    pub fn needs_input(&self) -> bool {
        self.0.needs_input()
    }

    /// The local weight, (out, local_in); its identity, but no values, where it comes [tile by tile](TiledWeight).
    pub fn weight(&self) -> &Tensor {
        self.0.weight()
    }

    /// What stays of the layer if its input is kept, or if whoever has the layer computes it again for [`Self::backward_with`].
    pub fn tape_of(&self, is_computed_again: bool) -> Tape {
        let (input, _) = self.0.weight.row_bytes();
        let [with_input, waiting] = self.0.waiting_bytes();
        let bytes = |is_read, bytes| if is_read { bytes } else { 0 };
        let of_input = with_input + bytes(self.0.reads_input(), input);
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
        let Linear { bias, region, .. } = &self.0;
        let is_first = region.tp().rank() == 0;
        let after = residual.filter(|_| region.divides_rows());
        let residual = residual.filter(|_| is_first && after.is_none());
        let bias = bias.as_ref().filter(|_| is_first);
        let partial = self.0.product(xs, bias, residual, pass)?;
        let ys = region.leave(&partial)?;
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
        let dy = &self.0.region.enter(dy, pass)?;
        let (dx, inner) = input_grad(&[(&self.0, dy)], pass)?;
        let (result, xs) = rest(dx)?;
        let inner = inner.iter().flatten().next();
        self.0
            .put_gradients(dy, inner, xs.as_ref(), is_computed_again, gradients)?;
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
        self.0.weights()
    }

    fn tape(&self) -> Option<Tape> {
        Some(self.tape_of(false))
    }
}
