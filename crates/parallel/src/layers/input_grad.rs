//! The gradient of a linear layer's input, of weights that may come tile by tile.

use candle_core::{D, DType, Result, Tensor};
use candle_ops::{LinearWeight, linear_weight_grad_into};

use crate::params::TiledWeight;

/// The sum of `dy W` over the terms `(dy, W)`, of which there is one at least; (.., out) and (out, in) -> (.., in). Products with
/// tiles are summed in f32, which is rounded once.
pub(super) fn input_grad(terms: &[(&Tensor, &TiledWeight)]) -> Result<Tensor> {
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
