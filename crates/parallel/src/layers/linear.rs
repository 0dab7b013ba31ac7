//! What linear layers whose weight is divided over tensor-parallel ranks have in common, inside of their region: the
//! product, its gradients, and what of it stays in memory.

use candle_core::{D, DType, Result, Tensor, bail};
use candle_ops::{LinearWeight, linear_bias_grad_into, linear_weight_grad_into};

use super::low_rank::{InnerGrad, LowRank};
use crate::params::TiledWeight;
use crate::pass::{GradientSink, Pass, Region, WeightGrad};

/// A weight (out, in) or this rank's part of it, with its bias and its low-rank adapter.
#[derive(Clone)]
pub(super) struct Linear {
    pub weight: TiledWeight,
    pub bias: Option<Tensor>,
    pub low_rank: Option<LowRank>,
    pub region: Region,
}

impl Linear {
    /// The identity of the weight.
    pub fn weight(&self) -> &Tensor {
        self.weight.tensor()
    }

    pub fn weights(&self) -> Vec<&Tensor> {
        let adapter = self.low_rank.iter().flat_map(LowRank::weights);
        let weights = std::iter::once(self.weight()).chain(&self.bias);
        weights.chain(adapter).collect()
    }

    /// Whether the backward pass needs the input.
    pub fn needs_input(&self) -> bool {
        let adapter = self.low_rank.as_ref();
        self.weight().track_op() || adapter.is_some_and(LowRank::is_trained)
    }

    /// Whether a gradient reads the input as it is.
    pub fn reads_input(&self) -> bool {
        let adapter = self.low_rank.as_ref();
        self.weight().track_op() || adapter.is_some_and(LowRank::shares_input)
    }

    /// Bytes for each row that gradients read beside the input: those that read the input, too, and those that do not.
    pub fn waiting_bytes(&self) -> [usize; 2] {
        let adapter = self.low_rank.as_ref();
        let [of_a, of_b] = adapter.map_or([0; 2], LowRank::waiting_bytes);
        let (_, dy) = self.weight.row_bytes();
        let waits_anyway = self.bias.as_ref().is_some_and(Tensor::track_op)
            || adapter.is_some_and(LowRank::trains_b);
        match (waits_anyway, self.weight().track_op()) {
            (true, _) => [of_a, of_b + dy],
            (false, true) => [of_a + dy, of_b],
            (false, false) => [of_a, of_b],
        }
    }

    /// The output for `xs` (.., in), with `bias` and `residual` (.., out) if they are given.
    pub fn product(
        &self,
        xs: &Tensor,
        bias: Option<&Tensor>,
        residual: Option<&Tensor>,
        pass: &Pass,
    ) -> Result<Tensor> {
        let bias = bias.map(Tensor::detach);
        let ys = self.weight.linear(xs, bias.as_ref(), residual)?;
        match &self.low_rank {
            None => Ok(ys),
            Some(adapter) => adapter.forward_add(&ys, xs, pass),
        }
    }

    /// Puts the gradients of the weights from that of the output, `dy` (.., out), and `inner`, which [`input_grad`]
    /// gives. `is_computed_again`: the forward pass has not kept the input, which the weight's gradient would.
    pub fn put_gradients(
        &self,
        dy: &Tensor,
        inner: Option<&InnerGrad>,
        xs: Option<&Tensor>,
        is_computed_again: bool,
        gradients: &mut dyn GradientSink,
    ) -> Result<()> {
        if self.weight().track_op() {
            let (dy, xs) = (dy.clone(), kept(xs)?.clone());
            let grad: WeightGrad =
                Box::new(move |dst, add| linear_weight_grad_into(dst, add, &dy, &xs));
            if is_computed_again {
                gradients.put_large(self.weight(), grad)?;
            } else {
                gradients.put(self.weight(), grad)?;
            }
        }
        if let Some(bias) = &self.bias {
            let dy = dy.clone();
            let grad = move |dst: &Tensor, add| linear_bias_grad_into(dst, add, &dy);
            gradients.put(bias, Box::new(grad))?;
        }
        let adapter = self.low_rank.as_ref().filter(|it| it.is_trained());
        if let (Some(adapter), Some(inner)) = (adapter, inner) {
            adapter.put_gradients(inner, kept(xs)?, is_computed_again, dy, gradients)?;
        }
        Ok(())
    }
}

/// The gradient (.., in) of an input that linear layers share, one at least, from those of their outputs (.., out); and
/// of each of them that of its adapter's x Aᵀ.
pub(super) fn input_grad(
    layers: &[(&Linear, &Tensor)],
    pass: &Pass,
) -> Result<(Tensor, Vec<Option<InnerGrad>>)> {
    let inner = layers.iter().map(|(layer, dy)| {
        let adapter = layer.low_rank.as_ref();
        adapter.map(|it| it.inner_grad(dy, pass)).transpose()
    });
    let inner: Vec<Option<InnerGrad>> = inner.collect::<Result<_>>()?;
    let adapters = || {
        let adapters = layers.iter().map(|(layer, _)| layer.low_rank.as_ref());
        let pairs = adapters.zip(&inner);
        pairs.filter_map(|(adapter, inner)| adapter.zip(inner.as_ref()))
    };
    let terms = layers.iter().map(|(layer, dy)| (*dy, &layer.weight));
    let of_adapters = adapters().filter_map(|(adapter, inner)| adapter.input_term(inner));
    let mut grad = sum_of_products(&terms.chain(of_adapters).collect::<Vec<_>>())?;
    for (adapter, inner) in adapters() {
        grad = adapter.add_dropped(grad, inner)?;
    }
    Ok((grad, inner))
}

/// The sum of `dy W` over the terms `(dy, W)`, of which there is one at least; (.., out) and (out, in) -> (.., in).
/// Products with tiles are summed in f32, which is rounded once.
fn sum_of_products(terms: &[(&Tensor, &TiledWeight)]) -> Result<Tensor> {
    let Some((first, weight)) = terms.iter().find(|(_, weight)| weight.is_tiled()) else {
        let whole = terms.iter().map(|(dy, weight)| (*dy, weight.whole()));
        return LinearWeight::input_grad_sum(&whole.collect::<Vec<_>>());
    };
    let (_, num_in) = weight.dims2()?;
    let leading = &first.dims()[..first.rank() - 1];
    let num_rows = leading.iter().product::<usize>();
    let sum = Tensor::zeros(num_rows * num_in, DType::F32, first.device())?;
    let mut add = false;
    for (dy, weight) in terms {
        let dy = dy.reshape((num_rows, dy.dim(D::Minus1)?))?;
        weight.for_each_tile(|rows, tile| {
            // dy W is the gradient of a weight, (dyᵀ)ᵀ W, and that goes into f32.
            let dy = dy.narrow(1, rows.start, rows.len())?.t()?.contiguous()?; // (rows of the tile, n)
            linear_weight_grad_into(&sum, std::mem::replace(&mut add, true), &dy, tile)
        })?;
    }
    let shape = [leading, &[num_in]].concat();
    sum.reshape(shape)?.to_dtype(first.dtype())
}

/// The input of a layer whose weight is trained.
fn kept(xs: Option<&Tensor>) -> Result<&Tensor> {
    match xs {
        Some(xs) => Ok(xs),
        None => bail!(
            "a linear layer with a trainable weight or adapter got no input in its backward pass"
        ),
    }
}
