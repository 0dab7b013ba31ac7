//! Sums of squares, of which the norm is made.

use candle_core::{DType, Result, Tensor};
use candle_ops::{sum_into, sum_of_squares_into};

use crate::params::{FlatBuffer, Parameters};
use crate::placement::{intersect, joined};

/// Of each bucket the sum of the squares of what this rank counts of it: so that the order in which buckets are reduced changes no bit.
pub(super) struct Squares(Tensor);

impl Squares {
    /// Zeros.
    pub fn new(params: &Parameters) -> Result<Self> {
        let num_buckets = params.layout().buckets.len();
        let device = params.groups().shard.device();
        Ok(Self(Tensor::zeros(num_buckets, DType::F64, device)?))
    }

    /// Of `own`, this rank's part of a reduced bucket, the values that it owns: each of the model counts on one rank.
    pub fn set(&self, params: &Parameters, index: usize, own: &FlatBuffer) -> Result<()> {
        let groups = params.groups();
        if groups.replicate.rank() > 0 {
            return Ok(());
        }
        let (bucket, sum) = (&params.layout().buckets[index], self.0.narrow(0, index, 1)?);
        let part = groups.own_range(bucket.len);
        let owned = bucket.slots.iter().flat_map(|slot| {
            let start = slot.range.start;
            let owned = params.owned(slot.param).iter();
            owned.map(move |owned| start + owned.start..start + owned.end)
        });
        let owned = joined(owned.map(|owned| intersect(&owned, &part)));
        for (place, owned) in owned.into_iter().enumerate() {
            let values = own.view(owned.start - part.start, owned.len())?;
            sum_of_squares_into(&sum, place > 0, &values)?;
        }
        Ok(())
    }

    /// The sum over all buckets, one value.
    pub fn sum(&self) -> Result<Tensor> {
        // Not candle's sum, which sends the shape to a GPU from memory that is not pinned: the host may wait for that.
        let sum = Tensor::zeros(1, DType::F64, self.0.device())?;
        sum_into(&sum, false, &self.0)?;
        Ok(sum)
    }
}
