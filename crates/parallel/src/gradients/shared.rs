//! Sums over what several ranks of a replica hold: parts that overlap, replicated parameters with partial gradients, ties.

use candle_comm::{ProcessGroup, ReduceOp};
use candle_core::{DType, Result, Tensor};

use crate::params::{Bucket, FlatBuffer, Gradient, Parameters, intersect};

/// Sums the gradients of a bucket's values that several tensor-parallel ranks hold, where each has a summand. All ranks of the
/// group must call it. One sum moves all such values of the bucket, and no others.
pub(super) fn sum_overlaps(
    params: &Parameters,
    bucket: &Bucket,
    flat: &FlatBuffer,
    tp: &ProcessGroup,
) -> Result<()> {
    if tp.world_size() == 1 {
        return Ok(());
    }
    let mut pieces = Vec::new();
    let mut len = 0;
    for slot in &bucket.slots {
        let param = params.get(slot.param);
        let (dim, held) = param.held();
        for overlap in params.overlaps(slot.param) {
            if overlap.gradient == Gradient::Complete {
                continue;
            }
            // The overlap's global shape, and what of it lies here.
            let mut dims = param.global_shape.dims().to_vec();
            if let Some(width) = dims.get_mut(dim) {
                *width = overlap.range.len();
            }
            let num_values: usize = dims.iter().product();
            if intersect(&overlap.range, &held) == overlap.range {
                let local = flat.view(slot.range.start, param.num_values())?;
                let local = local.reshape(param.local_shape())?;
                let local = match local.rank() {
                    0 => local,
                    _ => {
                        local.narrow(dim, overlap.range.start - held.start, overlap.range.len())?
                    }
                };
                pieces.push((len, local));
            }
            len += num_values;
        }
    }
    if len == 0 {
        return Ok(());
    }
    let mine = Tensor::zeros(len, DType::F32, tp.device())?;
    for (start, local) in &pieces {
        mine.slice_set(&local.contiguous()?.flatten_all()?, 0, *start)?;
    }
    let sum = tp.all_reduce(&mine, ReduceOp::Sum)?;
    for (start, local) in &pieces {
        let values = sum.narrow(0, *start, local.elem_count())?;
        write_through(local, &values.reshape(local.shape())?)?;
    }
    Ok(())
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
