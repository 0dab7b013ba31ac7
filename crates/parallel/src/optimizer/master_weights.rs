//! The f32 weights that an optimizer updates when the model computes with narrower ones (arXiv:1710.03740, section 3.1).
//!
//! bf16 keeps 8 bits: an update of less than 1/512 of a weight would be rounded away, step after step; f16 keeps 11. So the sum of the
//! updates lives in f32, and the model's weight is that sum, rounded anew after each step. Weights in f32 are their own
//! masters. Each rank has masters only of what it updates.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, bail};

use crate::params::{Bucket, FlatBuffer, Parameters, intersect, offset_by};

/// The masters of a rank's part of one bucket; `None` if its weights are f32.
pub(crate) struct MasterWeights(Option<FlatBuffer>);

impl MasterWeights {
    /// Masters of the weights in the range `own` of `bucket`, with the values that these have.
    pub fn new(
        params: &Parameters,
        bucket: &Bucket,
        own: &Range<usize>,
        device: &Device,
    ) -> Result<Self> {
        if bucket_dtype(params, bucket)? == DType::F32 {
            return Ok(Self(None));
        }
        let values = FlatBuffer::zeros(own.len(), device)?;
        for slot in &bucket.slots {
            let mine = intersect(&slot.range, own);
            if !mine.is_empty() {
                let param = params.get(slot.param);
                let weights = param.flat_part(&offset_by(&mine, slot.range.start))?;
                values.write(mine.start - own.start, &weights)?;
            }
        }
        Ok(Self(Some(values)))
    }

    /// All masters, flat; `None` if the weights are f32.
    pub fn tensor(&self) -> Option<&Tensor> {
        self.0.as_ref().map(FlatBuffer::tensor)
    }

    pub fn num_bytes(&self) -> usize {
        self.0.as_ref().map_or(0, FlatBuffer::num_bytes)
    }
}

/// The one type of a bucket's weights.
fn bucket_dtype(params: &Parameters, bucket: &Bucket) -> Result<DType> {
    let mut slots = bucket.slots.iter().map(|slot| params.get(slot.param));
    let Some(first) = slots.next() else {
        return Ok(DType::F32);
    };
    let dtype = first.dtype();
    if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
        bail!(
            "parameter {} is of type {dtype:?}; expected F32, BF16 or F16",
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
