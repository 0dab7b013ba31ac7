//! In what form gradients move between data-parallel ranks, which sum them in f32.

use candle_comm::{Pending, ProcessGroup, ReduceOp};
use candle_core::{DType, Result, Tensor};
use candle_ops::{QuantizedType, dequantize_sum_into, quantize_rows, quantize_rows_transposed};

use crate::data_parallel::ReduceType;
use crate::memory::{MemoryCategory, MemoryGuard, MemoryMeter, num_bytes};
use crate::params::{Bucket, FlatBuffer, ReplicaGroups, in_dtype};

/// The sum of a bucket over the ranks that divide it, under way; without such ranks over those that hold the same.
pub(super) struct Sum {
    whole: FlatBuffer,
    moved: Pending<Tensor>,
    form: ReduceType,
    /// Counts the copy that moves, if it is one, and what comes of it.
    copy: Option<MemoryGuard>,
    meter: MemoryMeter,
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
        let (shard, flat) = (&groups.shard, whole.tensor());
        let is_divided = shard.world_size() > 1;
        let copy = match (form, form.quantized(), &groups.hops) {
            (_, Some(to), Some([within, across])) => {
                let of_groups = flat.reshape((across.world_size(), within.world_size(), ()))?;
                Some(quantize_rows_transposed(&of_groups, to)?)
            }
            (_, Some(to), None) => {
                Some(quantize_rows(&flat.reshape((shard.world_size(), ()))?, to)?)
            }
            (ReduceType::Bf16, ..) => Some(in_dtype(flat.clone(), DType::BF16)?),
            _ => None,
        };
        let moved = match (&copy, form.quantized(), &groups.hops) {
            (Some(rows), Some(_), Some([within, _])) => within.start_all_to_all(rows)?,
            (Some(rows), Some(_), None) => shard.start_all_to_all(rows)?,
            (Some(copy), ..) if is_divided => shard.start_reduce_scatter(copy, ReduceOp::Sum)?,
            (Some(copy), ..) => groups.replicate.start_all_reduce(copy, ReduceOp::Sum)?,
            (None, ..) if is_divided => shard.start_reduce_scatter_in_place(flat, ReduceOp::Sum)?,
            (None, ..) => groups
                .replicate
                .start_all_reduce_in_place(flat, ReduceOp::Sum)?,
        };
        // And its result, which is here before anybody waits for it.
        let result = |copy: &Tensor| match form.quantized() {
            Some(_) => num_bytes(copy),
            None => num_bytes(copy) / shard.world_size(),
        };
        let hold = |copy: &Tensor| {
            let bytes = num_bytes(copy) + result(copy);
            meter.hold(MemoryCategory::Buffers, bytes)
        };
        Ok(Self {
            copy: copy.as_ref().map(hold),
            whole,
            moved,
            form,
            meter: meter.clone(),
        })
    }

    /// Waits for the sum, and returns this rank's part of it, a view of the whole bucket.
    pub fn finish(self, groups: &ReplicaGroups) -> Result<FlatBuffer> {
        let moved = self.moved.wait()?;
        let own = groups.own_range(self.whole.tensor().elem_count());
        let own = FlatBuffer::new(self.whole.view(own.start, own.len())?)?;
        match (self.form, self.form.quantized(), &groups.hops) {
            (_, Some(from), Some([_, across])) => {
                // Where the whole was, which is packed and has moved.
                let num_sums = across.world_size() * own.tensor().elem_count();
                let sums = self.whole.view(0, num_sums)?;
                let sums = sums.reshape((across.world_size(), ()))?;
                dequantize_sum_into(&sums, false, &moved, from)?;
                drop((moved, self.copy));
                second_hop(&sums, own.tensor(), across, from, &self.meter)?;
            }
            (_, Some(from), None) => dequantize_sum_into(own.tensor(), false, &moved, from)?,
            (ReduceType::Bf16, ..) => own.write(0, &moved)?,
            _ => {}
        }
        Ok(own)
    }
}

/// Packs the sums of a group of ranks again, a row of `sums` for each group, and writes to `own` the sum of what the groups have of this rank's
/// slice (qgZ of ZeRO++, arXiv:2306.10209, section 3.3). `own` may be a part of what `sums` is.
fn second_hop(
    sums: &Tensor,
    own: &Tensor,
    across: &ProcessGroup,
    form: QuantizedType,
    meter: &MemoryMeter,
) -> Result<()> {
    let rows = quantize_rows(sums, form)?;
    let _held = meter.hold(MemoryCategory::Buffers, 2 * num_bytes(&rows));
    let moved = across.start_all_to_all(&rows)?.wait()?;
    dequantize_sum_into(own, false, &moved, form)
}
