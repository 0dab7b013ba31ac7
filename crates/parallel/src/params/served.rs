//! Weights that one rank updates and others compute with: what a server sends to workers, and what these take.
//!
//! Values move bucket by bucket, as gradients do. A rank has the same buckets whatever divides them, but for what they are padded with.

use std::ops::Range;

use candle_core::{Result, Tensor, bail};

use super::changes::SaveSource;
use super::layout::Bucket;
use super::parameters::Parameters;

impl Parameters {
    /// Of each bucket of trainable parameters the values that this rank updates.
    pub fn own_ranges(&self) -> Vec<Range<usize>> {
        let own = |bucket: &Bucket| {
            let num_values = bucket.slots.last().map_or(0, |slot| slot.range.end);
            let own = self.groups().own_range(bucket.len);
            let start = own.start.min(num_values);
            start..own.end.min(num_values)
        };
        self.layout().buckets.iter().map(own).collect()
    }

    /// Bytes of the largest bucket, as gradients and masters.
    pub fn largest_bucket_bytes(&self) -> usize {
        let lens = self.layout().all().map(|bucket| bucket.len);
        lens.max().unwrap_or_default() * size_of::<f32>()
    }

    /// A copy of the weights at [`Self::own_ranges`], a flat tensor of each bucket.
    ///
    /// # Errors
    /// Values that are not here.
    pub fn own_slices(&self) -> Result<Vec<Tensor>> {
        self.pending().wait_for_all()?;
        let slice = |(index, own): (usize, Range<usize>)| {
            let bucket = &self.layout().buckets[index];
            let slice = Tensor::zeros(own.len(), bucket.dtype, self.groups().shard.device())?;
            for (slot, mine) in bucket.slots_in(&own) {
                let values = self.own_weights(index, slot, &mine)?;
                slice.slice_set(&values, 0, mine.start - own.start)?;
            }
            Ok(slice)
        };
        let ranges = self.own_ranges();
        ranges.into_iter().enumerate().map(slice).collect()
    }

    /// Takes the [slices](Self::own_slices) that another rank has at `ranges`, after `num_updates` updates there. This rank has the weights
    /// whole.
    ///
    /// # Errors
    /// Slices that do not fit the ranges, or ranges that do not fit these parameters: another model's.
    pub fn take_slices(
        &self,
        ranges: &[Range<usize>],
        slices: &[Tensor],
        num_updates: usize,
    ) -> Result<()> {
        let buckets = &self.layout().buckets;
        if (ranges.len(), slices.len()) != (buckets.len(), buckets.len()) {
            bail!(
                "{} ranges and {} slices of weights for {} buckets",
                ranges.len(),
                slices.len(),
                buckets.len()
            );
        }
        for (index, (range, slice)) in ranges.iter().zip(slices).enumerate() {
            let bucket = &buckets[index];
            if (slice.dims1()?, slice.dtype()) != (range.len(), bucket.dtype)
                || range.end > bucket.len
            {
                bail!(
                    "a slice {slice:?} of weights for {range:?} of a bucket of {} values of {}",
                    bucket.len,
                    bucket.dtype.as_str()
                );
            }
            self.change_weights(index, || {
                for (slot, mine) in bucket.slots_in(range) {
                    let values = slice.narrow(0, mine.start - range.start, mine.len())?;
                    let place = self.own_weights(index, slot, &mine)?;
                    place.slice_set(&values, 0, 0)?;
                    self.set_save_source(slot.param, SaveSource::Update);
                }
                Ok(())
            })?;
        }
        self.set_num_updates(num_updates);
        Ok(())
    }
}
