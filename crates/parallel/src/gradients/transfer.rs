//! In what form gradients move between data-parallel ranks, which sum them in f32.

use candle_comm::{Pending, ReduceOp};
use candle_core::{DType, Result, Tensor};
use candle_ops::{dequantize_int8_sum_into, quantize_int8};

use crate::memory::{MemoryCategory, MemoryGuard, MemoryMeter, num_bytes};
use crate::params::{Bucket, FlatBuffer, ReduceType, ReplicaGroups, in_dtype};

/// The sum of a bucket over the ranks that divide it, under way; without such ranks over those that hold the same.
pub(super) struct Sum {
    whole: FlatBuffer,
    moved: Pending<Tensor>,
    form: ReduceType,
    /// Counts the copy that moves, if it is one, and what comes of it.
    _copy: Option<MemoryGuard>,
}

impl Sum {
    /// Starts to sum `whole`, the values of `bucket`, which must not be touched before [`Self::finish`].
    pub fn start(
        whole: FlatBuffer,
        bucket: &Bucket,
        groups: &ReplicaGroups,
        meter: &MemoryMeter,
    ) -> Result<Self> {
        let form = groups.reduce_type(bucket);
        let shard = &groups.shard;
        let is_divided = shard.world_size() > 1;
        let flat = whole.tensor();
        let copy = match form {
            ReduceType::F32 => None,
            ReduceType::Bf16 => Some(in_dtype(flat.clone(), DType::BF16)?),
            // A row for each rank (arXiv:2306.10209, section 4.3).
            ReduceType::Int8 => {
                let rows = flat.reshape((shard.world_size(), ()))?;
                Some(quantize_int8(&rows)?)
            }
        };
        let moved = match (&copy, form) {
            (None, _) if is_divided => shard.start_reduce_scatter_in_place(flat, ReduceOp::Sum)?,
            (None, _) => groups
                .replicate
                .start_all_reduce_in_place(flat, ReduceOp::Sum)?,
            (Some(rows), ReduceType::Int8) => shard.start_all_to_all(rows)?,
            (Some(copy), _) if is_divided => shard.start_reduce_scatter(copy, ReduceOp::Sum)?,
            (Some(copy), _) => groups.replicate.start_all_reduce(copy, ReduceOp::Sum)?,
        };
        // And its result, which is here before anybody waits for it.
        let result = |copy: &Tensor| match form {
            ReduceType::Int8 => num_bytes(copy),
            _ => num_bytes(copy) / shard.world_size(),
        };
        let hold = |copy: &Tensor| {
            let bytes = num_bytes(copy) + result(copy);
            meter.hold(MemoryCategory::Buffers, bytes)
        };
        Ok(Self {
            _copy: copy.as_ref().map(hold),
            whole,
            moved,
            form,
        })
    }

    /// Waits for the sum, and returns this rank's part of it, a view of the whole bucket.
    pub fn finish(self, groups: &ReplicaGroups) -> Result<FlatBuffer> {
        let moved = self.moved.wait()?;
        let own = groups.own_range(self.whole.tensor().elem_count());
        let own = FlatBuffer::new(self.whole.view(own.start, own.len())?)?;
        match self.form {
            ReduceType::F32 => {}
            ReduceType::Bf16 => own.write(0, &moved)?,
            ReduceType::Int8 => dequantize_int8_sum_into(own.tensor(), false, &moved)?,
        }
        Ok(own)
    }
}
