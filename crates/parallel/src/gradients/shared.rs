//! Sums over what several ranks of a replica hold: ranges that several hold, replicated parameters with partial gradients, ties.

use candle_comm::{ProcessGroup, ReduceOp};
use candle_core::{DType, Result, Tensor, bail};

use crate::params::{Bucket, FlatBuffer, Parameters};
use crate::pass::is_each_the_whole;
use crate::placement::{Gradient, Placement};

/// Sums the gradients of a bucket's values that several tensor-parallel ranks hold, where each has a summand. All ranks of the
/// group must call it. One sum moves all such values of the bucket, and no others. `is_summand` tells of which parameters' gradients
/// were seen to be summands; it is an error if one is not.
pub(super) fn sum_shared_ranges(
    params: &Parameters,
    bucket: &Bucket,
    flat: &FlatBuffer,
    tp: &ProcessGroup,
    is_summand: &mut [bool],
) -> Result<()> {
    if tp.world_size() == 1 {
        return Ok(());
    }
    let mut pieces = Vec::new();
    let mut len = 0;
    for slot in &bucket.slots {
        let param = params.get(slot.param);
        if let Placement::Replicated(Gradient::Complete) = param.placement {
            continue;
        }
        let (dim, _) = param.held();
        for shared in params.shared_ranges(slot.param) {
            // The shared range's global shape, and what of it lies here.
            let mut dims = param.global_shape.dims().to_vec();
            if let Some(width) = dims.get_mut(dim) {
                *width = shared.range.len();
            }
            let num_values: usize = dims.iter().product();
            let local = flat.view(slot.range.start, param.num_values())?;
            let local = local.reshape(param.local_shape())?;
            if let Some(local) = param.narrow(&local, &shared.range)? {
                pieces.push(SummedValues {
                    start: len,
                    local,
                    param: slot.param,
                    num_holders: shared.ranks.len(),
                });
            }
            len += num_values;
        }
    }
    if len == 0 {
        return Ok(());
    }
    let mine = Tensor::zeros(len, DType::F32, tp.device())?;
    for piece in &pieces {
        mine.slice_set(&piece.local.contiguous()?.flatten_all()?, 0, piece.start)?;
    }
    let sum = tp.all_reduce(&mine, ReduceOp::Sum)?;
    for piece in &pieces {
        let (local, param) = (&piece.local, piece.param);
        let values = sum.narrow(0, piece.start, local.elem_count())?;
        if !is_summand[param] {
            let name = &params.get(param).name;
            is_summand[param] = check_is_summand(name, local, &values, piece.num_holders)?;
        }
        write_through(local, &values.reshape(local.shape())?)?;
    }
    Ok(())
}

/// Values here of a parameter that other ranks hold, too.
struct SummedValues {
    /// Their place in the sum.
    start: usize,
    local: Tensor,
    param: usize,
    num_holders: usize,
}

/// Writes `values` into a view of a buffer, row by row where the view has gaps.
fn write_through(view: &Tensor, values: &Tensor) -> Result<()> {
    if view.is_contiguous() {
        return view.flatten_all()?.slice_set(&values.flatten_all()?, 0, 0);
    }
    for row in 0..view.dim(0)? {
        write_through(&view.get(row)?, &values.get(row)?)?;
    }
    Ok(())
}

/// An error if `mine` is no summand of `sum`, which the `num_holders` ranks that hold a parameter added up, but the whole gradient, on
/// each of them: it would count as often. Whether something can be said of it: not of zeros, nor of what has overflowed.
fn check_is_summand(name: &str, mine: &Tensor, sum: &Tensor, num_holders: usize) -> Result<bool> {
    if is_each_the_whole(mine, sum, num_holders)? {
        bail!(
            "the gradient of parameter {name} is the same on all {num_holders} tensor-parallel ranks that hold these values of it, though \
             it should be a summand on each: summed, it would be {num_holders} times too large\nhint: a weight that all ranks use on \
             the same values is asked for by get, or with Gradient::Complete; a layer whose Shard is the whole weight on every rank was \
             built with another group than mesh.tp, such as ProcessGroup::single: to hold the whole of a layer on each rank, use one that \
             is not parallel"
        );
    }
    let sum = sum.flatten_all()?.to_vec1::<f32>()?;
    let has_values = sum.iter().any(|sum| *sum != 0.0);
    Ok(has_values && sum.iter().all(|sum| sum.is_finite()))
}
