//! The f32 weights that an optimizer updates when the model computes with narrower ones (arXiv:1710.03740, section 3.1).
//!
//! bf16 keeps 8 bits: an update of less than 1/512 of a weight would be rounded away, step after step. So the sum of the
//! updates lives in f32, and the model's weight is that sum, rounded anew after each step. Weights in f32 are their own
//! masters. Each rank has masters only of what it updates.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, bail};

use crate::flat_buffer::FlatBuffer;
use crate::gradients::Bucket;
use crate::parameters::Parameters;

/// The masters of a rank's part of one bucket.
pub(crate) struct MasterWeights {
    dtype: DType,
    /// `None`: the weights are f32.
    values: Option<FlatBuffer>,
}

impl MasterWeights {
    /// Masters of the weights in the range `own` of `bucket`, with the values that these have.
    pub fn new(
        params: &Parameters,
        bucket: &Bucket,
        own: &Range<usize>,
        device: &Device,
    ) -> Result<Self> {
        let dtype = bucket_dtype(params, bucket)?;
        if dtype == DType::F32 {
            let values = None;
            return Ok(Self { dtype, values });
        }
        let values = FlatBuffer::zeros(own.len(), device)?;
        for (index, range) in &bucket.slots {
            let mine = intersect(range, own);
            if !mine.is_empty() {
                let weights = params
                    .get(*index)
                    .flat_part(&offset_by(&mine, range.start))?;
                values.write(mine.start - own.start, &weights)?;
            }
        }
        Ok(Self {
            dtype,
            values: Some(values),
        })
    }

    /// Type of the weights.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// All masters, flat; `None` if the weights are f32.
    pub fn tensor(&self) -> Option<&Tensor> {
        self.values.as_ref().map(FlatBuffer::tensor)
    }

    pub fn num_bytes(&self) -> usize {
        self.values.as_ref().map_or(0, FlatBuffer::num_bytes)
    }

    /// The masters in the range `own`; `None` if the weights are f32.
    pub fn get(&self, own: Range<usize>) -> Result<Option<Vec<f32>>> {
        let values = self.values.as_ref();
        values
            .map(|values| values.values(own.start, own.len()))
            .transpose()
    }
}

/// The one type of a bucket's weights.
fn bucket_dtype(params: &Parameters, bucket: &Bucket) -> Result<DType> {
    let mut slots = bucket.slots.iter().map(|(index, _)| params.get(*index));
    let Some(first) = slots.next() else {
        return Ok(DType::F32);
    };
    let dtype = first.var.dtype();
    if !matches!(dtype, DType::F32 | DType::BF16) {
        bail!(
            "parameter {} is of type {dtype:?}; expected F32 or BF16",
            first.name
        );
    }
    match slots.find(|param| param.var.dtype() != dtype) {
        None => Ok(dtype),
        Some(other) => bail!(
            "parameters {} and {} are of types {dtype:?} and {:?}; expected one type",
            first.name,
            other.name,
            other.var.dtype()
        ),
    }
}

/// The part of `a` that lies in `b`; empty if there is none.
pub(crate) fn intersect(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    a.start.clamp(b.start, b.end)..a.end.clamp(b.start, b.end)
}

/// `range`, counted from `start`, which is not beyond it.
pub(crate) fn offset_by(range: &Range<usize>, start: usize) -> Range<usize> {
    range.start - start..range.end - start
}

/// Ranges in rising order, those that follow each other without a gap as one; empty ones vanish.
pub(crate) fn joined(ranges: impl Iterator<Item = Range<usize>>) -> Vec<Range<usize>> {
    let mut joined: Vec<Range<usize>> = Vec::new();
    for range in ranges.filter(|range| !range.is_empty()) {
        match joined.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => joined.push(range),
        }
    }
    joined
}
