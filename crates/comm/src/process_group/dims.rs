//! Moving any dim to dim 0 and back: collectives act on dim 0, where a part is one run of memory.

use candle_core::{Result, Tensor};

use crate::error::argument;
use crate::memory::device::empty;

/// `xs` as backends take it: contiguous, without a graph.
pub(super) fn contiguous(xs: &Tensor) -> Result<Tensor> {
    match xs.elem_count() {
        0 => empty(xs.shape(), xs.dtype(), xs.device()),
        _ => xs.detach().contiguous(),
    }
}

/// An error unless `xs` has dim `dim`.
pub(super) fn check_dim(operation: &str, xs: &Tensor, dim: usize) -> Result<()> {
    if dim < xs.rank() {
        return Ok(());
    }
    Err(argument(format!(
        "{operation} along dim {dim}: the tensor of shape {:?} has no such dim",
        xs.dims()
    )))
}

/// An error unless `num_parts` divides dim `dim` of `xs`.
pub(super) fn check_divides(
    operation: &str,
    xs: &Tensor,
    dim: usize,
    num_parts: usize,
) -> Result<()> {
    check_dim(operation, xs, dim)?;
    let size = xs.dims()[dim];
    if size.is_multiple_of(num_parts) {
        return Ok(());
    }
    Err(argument(format!(
        "{operation} along dim {dim} of shape {:?}: {size} is not divisible by world_size({num_parts})",
        xs.dims()
    )))
}

/// Cuts dim `from` into parts and puts them one after the other along dim `to`:
/// `(a, num_parts * n, b) -> (num_parts * a, n, b)` from dim 1 to dim 0, and the inverse from dim 0 to dim 1.
pub(super) fn rearrange(
    xs: &Tensor,
    (from, to): (usize, usize),
    num_parts: usize,
) -> Result<Tensor> {
    if from == to || num_parts == 1 {
        return Ok(xs.clone());
    }
    let size = xs.dim(from)? / num_parts;
    if xs.elem_count() == 0 {
        // candle's cat panics on tensors without elements.
        let mut dims = xs.dims().to_vec();
        dims[from] = size;
        dims[to] *= num_parts;
        return xs.reshape(dims);
    }
    let parts = (0..num_parts)
        .map(|part| xs.narrow(from, part * size, size))
        .collect::<Result<Vec<_>>>()?;
    Tensor::cat(&parts, to)
}
