//! The f32 weights that an optimizer updates when the model computes with narrower ones (arXiv:1710.03740, section 3.1).
//!
//! bf16 keeps 8 bits: an update of less than 1/512 of a weight would be rounded away, step after step; f16 keeps 11. So the sum of the
//! updates lives in f32, and the model's weight is that sum, rounded anew after each step. Weights in f32 are their own
//! masters. Each rank has masters only of what it updates.
//!
//! A bf16 weight is the upper half of its master already. A rule that can do so keeps the other half only, its
//! [remainder](candle_ops::split_master).

use std::collections::BTreeMap;
use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};
use candle_ops::{join_master, split_master};
use half::bf16;

use super::distributed::DistributedOptimizer;
use super::state_store::BucketState;
use crate::params::{FlatBuffer, Parameters, SaveSource, SetValues, Slot, move_storage};
use crate::placement::{intersect, offset_by};

impl DistributedOptimizer {
    /// The masters of `mine`, values of the parameter at `slot` of bucket `index` in `part` of what this rank updates of it, which must not be
    /// empty: flat, in f32. `kept` are the masters or remainders of the part.
    pub(super) fn masters(
        &self,
        index: usize,
        part: &Range<usize>,
        slot: &Slot,
        mine: &Range<usize>,
        kept: &Tensor,
    ) -> Result<Tensor> {
        let start = mine.start - part_of_own(&self.params, index, part).start;
        let kept = kept.narrow(0, start, mine.len())?;
        if kept.dtype() == DType::F32 {
            return Ok(kept);
        }
        // Of a view all of its storage would be fetched from a GPU.
        let kept = kept.force_contiguous()?.to_vec1::<i16>()?;
        let weights = self.params.own_weights(index, slot, mine)?;
        let weights = weights.force_contiguous()?.to_vec1::<bf16>()?;
        let parts = weights.into_iter().zip(kept);
        let masters = parts.map(|(weight, remainder)| join_master(weight, remainder));
        Tensor::from_vec(masters.collect(), mine.len(), &Device::Cpu)
    }

    /// Lets `look` read the parts of the state of bucket `index` that have values at `range` of what this rank updates, with masters in f32.
    pub(super) fn read(
        &self,
        index: usize,
        range: &Range<usize>,
        mut look: impl FnMut(&Range<usize>, &BucketState) -> Result<()>,
    ) -> Result<()> {
        self.follow_set_weights()?;
        let look = |part: &Range<usize>, state: &BucketState| {
            look(part, &self.joined(index, part, state)?)
        };
        self.store.read(index, range, look)
    }

    /// Lets `change` write to the state of bucket `index`, part by part, with its masters in f32. Weights that are a part of their masters
    /// change with these.
    pub(super) fn change(
        &self,
        index: usize,
        change: impl FnMut(&Range<usize>, &BucketState) -> Result<()>,
    ) -> Result<()> {
        self.follow_set_weights()?;
        self.change_masters(index, change)
    }

    /// Gives masters the values to which a program has [set](Parameters::set) their weights.
    pub(super) fn follow_set_weights(&self) -> Result<()> {
        let mut by_bucket: BTreeMap<usize, Vec<(&Slot, SetValues)>> = BTreeMap::new();
        for (param, set) in self.params.take_ahead_of_masters() {
            if let Some((bucket, _, slot)) = self.params.layout().slot(param) {
                by_bucket.entry(bucket).or_default().push((slot, set));
            }
        }
        for (bucket, all) in by_bucket {
            let are_joined = self.store.shape(bucket).master == Some(DType::I16);
            self.change_masters(bucket, |part, state| {
                let own = part_of_own(&self.params, bucket, part);
                let Some(masters) = &state.master else {
                    return Ok(());
                };
                for (slot, set) in &all {
                    let start = slot.range.start;
                    let places = start + set.range.start..start + set.range.end;
                    let both = intersect(&places, &own);
                    if both.is_empty() {
                        continue;
                    }
                    let place = both.start - own.start;
                    let dtype = self.params.get(slot.param).dtype();
                    let kept = masters.narrow(0, place, both.len())?;
                    let both = offset_by(&both, start);
                    let values = set.masters(&both, &kept, (dtype, are_joined))?;
                    masters.slice_set(&values, 0, place)?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    fn change_masters(
        &self,
        index: usize,
        mut change: impl FnMut(&Range<usize>, &BucketState) -> Result<()>,
    ) -> Result<()> {
        let change = |part: &Range<usize>, state: &BucketState| {
            let joined = self.joined(index, part, state)?;
            change(part, &joined)?;
            if let (Some(masters), Some(kept)) = (&joined.master, &state.master)
                && kept.dtype() == DType::I16
            {
                let remainders = split_masters(&self.params, index, part, masters, kept.device())?;
                move_storage(&remainders, kept)?;
            }
            Ok(())
        };
        if self.store.shape(index).master == Some(DType::I16) {
            if let Some(sharded) = self.params.sharded() {
                // Nothing that was gathered before may be taken for changed.
                sharded.free_all()?;
            }
            for slot in &self.params.layout().buckets[index].slots {
                self.params.set_save_source(slot.param, SaveSource::Update);
            }
        }
        self.params
            .change_weights(index, || self.store.change(index, change))
    }

    /// A part of the bucket with its masters in f32: on the host, if only remainders are kept.
    fn joined(
        &self,
        index: usize,
        part: &Range<usize>,
        state: &BucketState,
    ) -> Result<BucketState> {
        let mut joined = state.clone();
        if let Some(kept) = &state.master
            && kept.dtype() == DType::I16
        {
            let own = part_of_own(&self.params, index, part);
            let masters = FlatBuffer::zeros(own.len(), &Device::Cpu)?;
            for (slot, mine) in self.params.layout().buckets[index].slots_in(&own) {
                let values = self.masters(index, part, slot, &mine, kept)?;
                masters.write(mine.start - own.start, &values)?;
            }
            joined.master = Some(masters.into_tensor());
        }
        Ok(joined)
    }
}

/// Masters of type `dtype` of a part of what this rank updates of bucket `index`, flat. They begin with the values that the
/// weights were rounded from, or, where the weights were changed since, with theirs.
pub(super) fn master_weights(
    params: &Parameters,
    index: usize,
    part: &Range<usize>,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let bucket = &params.layout().buckets[index];
    let own = part_of_own(params, index, part);
    let values = FlatBuffer::zeros(own.len(), device)?;
    for (slot, mine) in bucket.slots_in(&own) {
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
    let masters = values.into_tensor();
    if dtype == DType::F32 {
        return Ok(masters);
    }
    split_masters(params, index, part, &masters, device)
}

/// A part of what this rank updates of a bucket, as a range of the bucket.
pub(super) fn part_of_own(params: &Parameters, index: usize, part: &Range<usize>) -> Range<usize> {
    let bucket = &params.layout().buckets[index];
    let own = params.groups().own_range(bucket.len);
    own.start + part.start..own.start + part.end
}

/// Makes the f32 values `masters` of a part of what this rank updates of bucket `index` its bf16 weights, and returns the remainders, on
/// `device`.
fn split_masters(
    params: &Parameters,
    index: usize,
    part: &Range<usize>,
    masters: &Tensor,
    device: &Device,
) -> Result<Tensor> {
    let bucket = &params.layout().buckets[index];
    let own = part_of_own(params, index, part);
    let parts = masters.to_vec1()?.into_iter().map(split_master);
    let (weights, remainders): (Vec<bf16>, Vec<i16>) = parts.unzip();
    for (slot, mine) in bucket.slots_in(&own) {
        let values = &weights[offset_by(&mine, own.start)];
        let values = Tensor::new(values, device)?;
        params
            .own_weights(index, slot, &mine)?
            .slice_set(&values, 0, 0)?;
    }
    Tensor::from_vec(remainders, own.len(), device)
}
