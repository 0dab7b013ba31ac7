//! Weights of which each data-parallel rank keeps a slice (ZeRO-3, arXiv:1910.02054, section 5.3): gathered for the pass of a
//! block, behind the tensors that its layers hold, and freed after.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_comm::{Pending, ProcessGroup};
use candle_core::{Result, Tensor};
use candle_ops::{dequantize_int8_into, quantize_int8, quantized_bytes};

use super::data_parallel::ReplicaGroups;
use super::layout::{Bucket, ParamLayout, Slot};
use super::param::Param;
use super::placement::intersect;
use crate::memory::{Held, MemoryCategory, MemoryMeter, num_bytes};

/// The slices of a rank, and what is gathered of the others'.
pub(crate) struct ShardedWeights {
    shard: ProcessGroup,
    is_quantized: bool,
    /// In the order of [`ParamLayout::all`].
    buckets: Vec<ShardedBucket>,
    /// Buckets that the passes of each block need.
    of_block: BTreeMap<usize, Vec<usize>>,
}

struct ShardedBucket {
    slice: Tensor,
    params: Vec<(Param, Slot)>,
    state: Mutex<State>,
    meter: MemoryMeter,
    _held: Held,
}

/// Where a bucket's whole weights are.
enum State {
    Absent,
    Gathering(Pending<Tensor>, Held),
    Present(Held),
}

impl ShardedWeights {
    /// Slices of `params`, whose initial values `values` gives, in their local shape and type; only one parameter's exist at a time.
    pub fn new(
        params: &[Param],
        (layout, groups, meter): (&ParamLayout, &ReplicaGroups, &MemoryMeter),
        values: impl Fn(&Param) -> Result<Tensor>,
    ) -> Result<Self> {
        let sharded = |bucket: &Bucket| {
            let own = groups.own_range(bucket.len);
            let slice = Tensor::zeros(own.len(), bucket.dtype, groups.shard.device())?;
            for slot in &bucket.slots {
                let mine = intersect(&slot.range, &own);
                if !mine.is_empty() {
                    let values = values(&params[slot.param])?.flatten_all()?;
                    let values = values.narrow(0, mine.start - slot.range.start, mine.len())?;
                    slice.slice_set(&values, 0, mine.start - own.start)?;
                }
            }
            let slots = bucket.slots.iter().cloned();
            let of_slot = |slot: Slot| (params[slot.param].clone(), slot);
            Ok(ShardedBucket {
                _held: meter.hold(MemoryCategory::Weights, num_bytes(&slice)),
                meter: meter.clone(),
                slice,
                params: slots.map(of_slot).collect(),
                state: Mutex::new(State::Absent),
            })
        };
        let mut of_block: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (index, bucket) in layout.all().enumerate() {
            for slot in &bucket.slots {
                for &block in &params[slot.param].blocks {
                    let needed = of_block.entry(block).or_default();
                    if !needed.contains(&index) {
                        needed.push(index);
                    }
                }
            }
        }
        Ok(Self {
            shard: groups.shard.clone(),
            is_quantized: groups.config.quantize_weights,
            buckets: layout.all().map(sharded).collect::<Result<_>>()?,
            of_block,
        })
    }

    /// This rank's slice of a bucket.
    pub fn slice(&self, bucket: usize) -> &Tensor {
        &self.buckets[bucket].slice
    }

    fn needed(&self, block: usize) -> &[usize] {
        self.of_block.get(&block).map_or(&[], Vec::as_slice)
    }

    /// Starts to gather what a block needs and what is not here. All ranks of the shard group must call it.
    pub fn prefetch(&self, block: usize) -> Result<()> {
        for &index in self.needed(block) {
            let bucket = &self.buckets[index];
            let mut state = bucket.lock();
            if let State::Absent = *state {
                let sent = match self.is_quantized {
                    true => quantize_int8(&bucket.slice)?,
                    false => bucket.slice.clone(),
                };
                let bytes = num_bytes(&sent) * self.shard.world_size();
                let held = bucket.meter.hold(MemoryCategory::Gathered, bytes);
                *state = State::Gathering(self.shard.start_all_gather(&sent)?, held);
            }
        }
        Ok(())
    }

    /// Puts the weights of a block in their places. All ranks of the shard group must call it.
    pub fn acquire(&self, block: usize) -> Result<()> {
        self.prefetch(block)?;
        let mut needed = self.needed(block).iter();
        needed.try_for_each(|&index| self.buckets[index].arrive())
    }

    /// Frees the weights of a block, but for what `next` needs too.
    pub fn free(&self, block: usize, next: Option<usize>) -> Result<()> {
        let kept = next.map_or(&[][..], |next| self.needed(next));
        let mut needed = self.needed(block).iter();
        needed.try_for_each(|index| match kept.contains(index) {
            true => Ok(()),
            false => self.buckets[*index].free(),
        })
    }

    /// Frees all weights but the slices.
    pub fn free_all(&self) -> Result<()> {
        self.buckets.iter().try_for_each(ShardedBucket::free)
    }
}

impl ShardedBucket {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn arrive(&self) -> Result<()> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Absent) {
            State::Gathering(whole, on_the_way) => {
                let whole = self.unpacked(whole.wait()?)?;
                drop(on_the_way);
                let _whole = self.meter.hold(MemoryCategory::Gathered, num_bytes(&whole));
                let bytes = self.params.iter().map(|(param, _)| param.num_bytes()).sum();
                let held = self.meter.hold(MemoryCategory::Gathered, bytes);
                for (param, slot) in &self.params {
                    let values = whole.narrow(0, slot.range.start, slot.range.len())?;
                    param.refill(&values.reshape(param.local_shape())?)?;
                }
                *state = State::Present(held);
            }
            other => *state = other,
        }
        Ok(())
    }

    /// Whole weights of what was gathered.
    fn unpacked(&self, gathered: Tensor) -> Result<Tensor> {
        let (len, dtype) = (self.slice.elem_count(), self.slice.dtype());
        if gathered.dtype() == dtype {
            return Ok(gathered);
        }
        if len == 0 {
            return Tensor::zeros(0, dtype, self.slice.device());
        }
        let rows = gathered.reshape(((), quantized_bytes(len)))?;
        let whole = Tensor::zeros((rows.dim(0)?, len), dtype, self.slice.device())?;
        dequantize_int8_into(&whole, false, &rows)?;
        whole.flatten_all()
    }

    fn free(&self) -> Result<()> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Absent) {
            State::Absent => Ok(()),
            // What was prefetched for a pass that did not come.
            State::Gathering(whole, _held) => whole.wait().map(drop),
            State::Present(_held) => self
                .params
                .iter()
                .try_for_each(|(param, _)| param.release()),
        }
    }
}
