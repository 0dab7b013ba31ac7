//! The f32 weights that an optimizer updates when the model computes with narrower ones (arXiv:1710.03740, section 3.1).
//!
//! bf16 keeps 8 bits: an update of less than 1/512 of a weight would be rounded away, step after step. So the sum of the
//! updates lives in f32, and the model's weight is that sum, rounded anew after each step. Weights in f32 are their own
//! masters. Each rank has masters only of what it updates.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, bail};

use crate::params::{Bucket, FlatBuffer, Parameters, intersect, offset_by};

/// Masters of the weights in the range `own` of `bucket`, flat; `None` if these are f32. They begin with the values that the weights
/// were rounded from, or, where the weights were changed since, with theirs.
pub(super) fn master_weights(
    params: &Parameters,
    bucket: &Bucket,
    own: &Range<usize>,
    device: &Device,
) -> Result<Option<Tensor>> {
    if !has_masters(params, bucket)? {
        return Ok(None);
    }
    let values = FlatBuffer::zeros(own.len(), device)?;
    for slot in &bucket.slots {
        let mine = intersect(&slot.range, own);
        if !mine.is_empty() {
            let param = params.get(slot.param);
            let part = offset_by(&mine, slot.range.start);
            let weights = match params.unrounded(slot.param)? {
                Some(whole) => Tensor::new(&whole[part], device)?,
                None => param.flat_part(&part)?,
            };
            values.write(mine.start - own.start, &weights)?;
        }
    }
    Ok(Some(values.into_tensor()))
}

/// Whether the weights of a bucket have masters: those narrower than f32.
pub(super) fn has_masters(params: &Parameters, bucket: &Bucket) -> Result<bool> {
    Ok(bucket_dtype(params, bucket)? != DType::F32)
}

/// The one type of a bucket's weights.
fn bucket_dtype(params: &Parameters, bucket: &Bucket) -> Result<DType> {
    let mut slots = bucket.slots.iter().map(|slot| params.get(slot.param));
    let Some(first) = slots.next() else {
        return Ok(DType::F32);
    };
    let dtype = first.dtype();
    if !matches!(dtype, DType::F32 | DType::BF16) {
        bail!(
            "parameter {} is of type {dtype:?}; expected F32 or BF16",
            first.name
        );
    }
    match slots.find(|param| param.dtype() != dtype) {
        None => Ok(dtype),
        Some(other) => bail!(
            "parameters {} and {} are of types {dtype:?} and {:?}; expected one type",
            first.name,
            other.name,
            other.dtype()
        ),
    }
}
