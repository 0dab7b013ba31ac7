//! Borders between what ranks of a group share and what each has for itself, differentiable.
//!
//! | function | forward | backward | paper |
//! |---|---|---|---|
//! | [`copy_to_tensor_parallel_region`] | identity | all_reduce | f in arXiv:1909.08053 |
//! | [`reduce_from_tensor_parallel_region`] | all_reduce | identity | g in arXiv:1909.08053 |
//! | [`scatter_to_tensor_parallel_region`] | split | all_gather | |
//! | [`gather_from_tensor_parallel_region`] | all_gather | split | |
//! | [`gather_from_sequence_parallel_region`] | all_gather | reduce_scatter | g in arXiv:2205.05198 |
//! | [`reduce_scatter_to_sequence_parallel_region`] | reduce_scatter | all_gather | ḡ in arXiv:2205.05198 |
//!
//! In a group of one each of them returns its input.

use candle_comm::{ProcessGroup, ReduceOp};
use candle_core::{D, Result, Tensor, bail};
use candle_ops::with_backward1;

use crate::params::part;

/// Enters a region where each rank computes with other weights: (..) -> (..); the gradients of all ranks are summed.
pub fn copy_to_tensor_parallel_region(xs: &Tensor, tp: &ProcessGroup) -> Result<Tensor> {
    if tp.world_size() == 1 {
        return Ok(xs.clone());
    }
    let tp = tp.clone();
    with_backward1(
        xs,
        xs.detach(),
        "copy_to_tensor_parallel_region",
        move |grad| Ok(Some(tp.all_reduce(grad, ReduceOp::Sum)?)),
    )
}

/// Leaves a region where each rank has a part of a sum: (..) -> (..), the sum.
pub fn reduce_from_tensor_parallel_region(xs: &Tensor, tp: &ProcessGroup) -> Result<Tensor> {
    if tp.world_size() == 1 {
        return Ok(xs.clone());
    }
    let sum = tp.all_reduce(&xs.detach(), ReduceOp::Sum)?;
    with_backward1(xs, sum, "reduce_from_tensor_parallel_region", |grad| {
        Ok(Some(grad.clone()))
    })
}

/// Keeps the rank's part of the last dim: (.., n) -> (.., n / tp).
pub fn scatter_to_tensor_parallel_region(xs: &Tensor, tp: &ProcessGroup) -> Result<Tensor> {
    if tp.world_size() == 1 {
        return Ok(xs.clone());
    }
    let mine = own_part(&xs.detach(), tp)?;
    let tp = tp.clone();
    with_backward1(xs, mine, "scatter_to_tensor_parallel_region", move |grad| {
        Ok(Some(tp.all_gather(grad, grad.rank() - 1)?))
    })
}

/// Joins the ranks' parts of the last dim: (.., n / tp) -> (.., n).
pub fn gather_from_tensor_parallel_region(xs: &Tensor, tp: &ProcessGroup) -> Result<Tensor> {
    if tp.world_size() == 1 {
        return Ok(xs.clone());
    }
    let joined = tp.all_gather(&xs.detach(), xs.rank() - 1)?;
    let tp = tp.clone();
    with_backward1(
        xs,
        joined,
        "gather_from_tensor_parallel_region",
        move |grad| Ok(Some(own_part(grad, &tp)?)),
    )
}

/// Joins the ranks' parts of the sequence (dim 1): (b, t / tp, ..) -> (b, t, ..).
pub fn gather_from_sequence_parallel_region(xs: &Tensor, tp: &ProcessGroup) -> Result<Tensor> {
    if tp.world_size() == 1 {
        return Ok(xs.clone());
    }
    let joined = tp.all_gather(&xs.detach(), 1)?;
    let tp = tp.clone();
    with_backward1(
        xs,
        joined,
        "gather_from_sequence_parallel_region",
        move |grad| Ok(Some(tp.reduce_scatter(grad, ReduceOp::Sum, 1)?)),
    )
}

/// Sums over the ranks and keeps the rank's part of the sequence (dim 1): (b, t, ..) -> (b, t / tp, ..).
pub fn reduce_scatter_to_sequence_parallel_region(
    xs: &Tensor,
    tp: &ProcessGroup,
) -> Result<Tensor> {
    if tp.world_size() == 1 {
        return Ok(xs.clone());
    }
    let mine = tp.reduce_scatter(&xs.detach(), ReduceOp::Sum, 1)?;
    let tp = tp.clone();
    with_backward1(
        xs,
        mine,
        "reduce_scatter_to_sequence_parallel_region",
        move |grad| Ok(Some(tp.all_gather(grad, 1)?)),
    )
}

/// Joins parts of the last dim that may be uneven, as [`crate::Shard::even`] cuts `global`; no gradient.
///
/// (.., part) -> (.., global)
pub fn gather_parts(xs: &Tensor, global: usize, tp: &ProcessGroup) -> Result<Tensor> {
    let world_size = tp.world_size();
    if world_size == 1 {
        return Ok(xs.detach());
    }
    let longest = global.div_ceil(world_size);
    let padding = longest - xs.dim(D::Minus1)?;
    let padded = xs
        .detach()
        .pad_with_zeros(D::Minus1, 0, padding)?
        .contiguous()?;
    let all = tp.all_gather(&padded, padded.rank() - 1)?;
    let parts = (0..world_size).map(|rank| {
        let len = part(global, rank, world_size).len();
        all.narrow(D::Minus1, rank * longest, len)
    });
    Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, D::Minus1)
}

fn own_part(xs: &Tensor, tp: &ProcessGroup) -> Result<Tensor> {
    let len = xs.dim(D::Minus1)?;
    if !len.is_multiple_of(tp.world_size()) {
        bail!(
            "cannot split the last dim of {:?} over {} tensor-parallel ranks: {len} is not divisible",
            xs.shape(),
            tp.world_size()
        );
    }
    let part = len / tp.world_size();
    xs.narrow(D::Minus1, tp.rank() * part, part)?.contiguous()
}
