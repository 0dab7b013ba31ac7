//! The f32 weights that an optimizer updates when the model computes with narrower ones (arXiv:1710.03740, section 3.1).
//!
//! bf16 keeps 8 bits: an update of less than 1/512 of a weight would be rounded away, step after step; f16 keeps 11. So the sum of the
//! updates lives in f32, and the model's weight is that sum, rounded anew after each step. Weights in f32 are their own
//! masters. Each rank has masters only of what it updates.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, bail};

use crate::params::{FlatBuffer, Parameters, intersect, offset_by};

/// Masters of the weights in the range `own` of bucket `index`, flat; `None` if these are f32. They begin with the values that the
/// weights were rounded from, or, where the weights were changed since, with theirs.
pub(super) fn master_weights(
    params: &Parameters,
    index: usize,
    own: &Range<usize>,
    device: &Device,
) -> Result<Option<Tensor>> {
    if !has_masters(params, index)? {
        return Ok(None);
    }
    let values = FlatBuffer::zeros(own.len(), device)?;
    for slot in &params.layout().buckets[index].slots {
        let mine = intersect(&slot.range, own);
        if !mine.is_empty() {
            let weights = match params.unrounded(slot.param)? {
                Some(mut values) => {
                    let mine = offset_by(&mine, slot.range.start);
                    values.truncate(mine.end);
                    values.drain(..mine.start);
                    Tensor::from_vec(values, mine.len(), device)?
                }
                None => params.own_weights(index, slot, &mine)?,
            };
            values.write(mine.start - own.start, &weights)?;
        }
    }
    Ok(Some(values.into_tensor()))
}

/// Whether the weights of bucket `index` have masters: those narrower than f32.
pub(super) fn has_masters(params: &Parameters, index: usize) -> Result<bool> {
    let bucket = &params.layout().buckets[index];
    match (bucket.dtype, bucket.slots.first()) {
        (DType::F32, _) => Ok(false),
        (DType::BF16 | DType::F16, _) => Ok(true),
        (dtype, slot) => bail!(
            "parameter {} is of type {dtype:?}; expected F32, BF16 or F16",
            slot.map_or("", |slot| &params.get(slot.param).name)
        ),
    }
}
