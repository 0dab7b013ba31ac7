//! Sums of gradients: written to, reduced over replicas, and where they are away taken and put back.

use candle_core::DType;

use super::super::planned_store::PlannedSums;
use super::{GRADIENT_BYTES, PlannedRank};
use crate::data_parallel::ReduceType;
use crate::memory::MemoryCategory;
use crate::params::{Bucket, Sharing, Slot};
use crate::placement::{Gradient, intersect};

impl PlannedRank<'_> {
    fn gradient_bytes(&self, index: usize) -> usize {
        GRADIENT_BYTES * self.spec.layout.gradient_bucket(index).len
    }

    /// What moves of a bucket of gradients if that is not itself, and what comes of it.
    fn copy_bytes(&self, index: usize) -> usize {
        let bucket = self.spec.layout.gradient_bucket(index);
        let num_slices = self.groups.shard.world_size();
        let form = self.groups.reduce_type(bucket);
        match form.quantized() {
            Some(packed) => 2 * num_slices * packed.row_bytes(bucket.len / num_slices),
            None if form == ReduceType::Bf16 => {
                DType::BF16.size_in_bytes() * (bucket.len + bucket.len / num_slices)
            }
            None => 0,
        }
    }

    /// A block writes to its gradients.
    pub(super) fn write_gradients(&mut self, block: usize) {
        let layout = &self.spec.layout;
        for index in 0..layout.num_gradient_buckets() {
            if layout.gradient_bucket(index).blocks.contains(&block) {
                self.take_whole(index);
            }
        }
    }

    /// A bucket is to be whole, which it always is unless it is divided or away.
    fn take_whole(&mut self, index: usize) {
        let bytes = self.gradient_bytes(index);
        self.is_settled[index] = false;
        match (self.groups.shards_gradients(), &self.sums) {
            (false, None) => {}
            _ if std::mem::replace(&mut self.is_whole[index], true) => {}
            (true, _) => self.held.hold(MemoryCategory::Buffers, bytes),
            (false, Some(_)) => self.take_sum(index),
        }
    }

    pub(super) fn block_done(&mut self, block: usize) {
        let layout = &self.spec.layout;
        if let Some(owed) = self.owed.get_mut(&block) {
            *owed = owed.saturating_sub(1);
        }
        if self.groups.shards_gradients() {
            for index in 0..layout.num_gradient_buckets() {
                if layout.gradient_bucket(index).blocks.first() == Some(&block) {
                    self.divide(index);
                }
            }
            return;
        }
        let overlaps = self.groups.config.overlap && self.spec.num_replicas > 1;
        for (index, bucket) in layout.buckets.iter().enumerate().filter(|_| overlaps) {
            if bucket.tie.is_some() {
                continue;
            }
            if !self.is_complete(bucket) {
                break;
            }
            self.start_sum(index);
            for earlier in 0..index {
                if self.sums.is_some() && self.is_summed[earlier] {
                    self.settle(earlier);
                }
            }
        }
        for index in 0..layout.num_gradient_buckets() {
            let is_last = layout.gradient_bucket(index).blocks.first() == Some(&block);
            if is_last && !self.is_summed[index] && std::mem::take(&mut self.is_whole[index]) {
                self.note_squares(index);
                self.put(index);
            }
        }
    }

    fn is_complete(&self, bucket: &Bucket) -> bool {
        let is_owed = |block: &usize| self.owed.get(block).is_none_or(|owed| *owed > 0);
        !bucket.blocks.iter().any(is_owed)
    }

    /// A sum that is away comes.
    fn take_sum(&mut self, index: usize) {
        if let Some(sums) = &mut self.sums {
            sums.take(index, &mut self.held);
        }
    }

    /// It goes back.
    fn put(&mut self, index: usize) {
        if let Some(sums) = &mut self.sums {
            sums.put(index);
        }
    }

    /// What no other rank adds to need not come back to be summed.
    fn note_squares(&mut self, index: usize) {
        let Some(bucket) = self.spec.layout.buckets.get(index) else {
            return;
        };
        let num_ranks = match self.groups.shards_gradients() {
            true => self.groups.replicate.world_size(),
            false => self.spec.num_replicas,
        };
        let is_own = bucket.sharing == Sharing::None && bucket.tie.is_none();
        if is_own && num_ranks == 1 && self.is_complete(bucket) {
            self.is_settled[index] = true;
        }
    }

    /// Starts to sum a micro-batch's gradients of a bucket over the ranks that divide it.
    fn divide(&mut self, index: usize) {
        if !std::mem::take(&mut self.is_whole[index]) {
            return;
        }
        self.held
            .hold(MemoryCategory::Buffers, self.copy_bytes(index));
        self.dividing.push_back(index);
        self.finish_dividing(usize::from(self.groups.config.overlap));
    }

    fn finish_dividing(&mut self, num_left: usize) {
        while self.dividing.len() > num_left {
            let Some(index) = self.dividing.pop_front() else {
                return;
            };
            self.held
                .free(MemoryCategory::Buffers, self.copy_bytes(index));
            self.take_sum(index);
            self.held
                .free(MemoryCategory::Buffers, self.gradient_bytes(index));
            if self.sums.is_some() && !self.dividing.contains(&index) {
                self.note_squares(index);
            }
            self.put(index);
        }
    }

    fn start_sum(&mut self, index: usize) {
        if !self.is_settled[index] && !std::mem::replace(&mut self.is_summed[index], true) {
            self.take_whole(index);
            let bytes = self.copy_bytes(index);
            self.held.hold(MemoryCategory::Buffers, bytes);
        }
    }

    /// The sums after the passes: two buckets are under way at a time.
    pub(super) fn reduce(&mut self) {
        let layout = &self.spec.layout;
        // The passes have ended.
        self.finish_sums();
        if self.groups.shards_gradients() {
            (0..layout.num_gradient_buckets()).for_each(|index| self.divide(index));
            self.finish_dividing(0);
        }
        for index in 0..=layout.buckets.len() {
            for stage in layout.stages_of(index) {
                if !self.groups.shards_gradients() {
                    self.start_sum(stage);
                }
            }
            if let Some(earlier) = index.checked_sub(1) {
                self.settle(earlier);
            }
        }
        self.finish_sums();
        if let Some(PlannedSums { store: sums, .. }) = &self.sums {
            // What tensor-parallel ranks have whole gradients of is compared together.
            let is_copy = |bucket: &Bucket, slot: &Slot| {
                let param = &self.spec.params[slot.param];
                let own = self.groups.own_range(bucket.len);
                param.replicated == Some(Gradient::Complete)
                    && !param.shared.is_empty()
                    && !intersect(&slot.range, &own).is_empty()
            };
            let buckets = layout.buckets.iter().enumerate();
            let copies = buckets.filter(|(_, bucket)| {
                let mut slots = bucket.slots.iter();
                slots.any(|slot| is_copy(bucket, slot))
            });
            let copies: Vec<usize> = copies.map(|(index, _)| index).collect();
            for &index in &copies {
                sums.fetch(index, &mut self.held);
            }
            for &index in &copies {
                sums.release(index, &mut self.held);
            }
        }
        self.is_settled.fill(false);
    }

    fn finish_sums(&mut self) {
        if let Some(sums) = &mut self.sums {
            sums.finish(&mut self.held);
        }
    }

    /// The sum of a bucket ends.
    fn settle(&mut self, index: usize) {
        if std::mem::replace(&mut self.is_settled[index], true) {
            return;
        }
        let is_divided = self.groups.shards_gradients();
        for stage in self.spec.layout.stages_of(index) {
            if std::mem::take(&mut self.is_summed[stage]) {
                let bytes = self.copy_bytes(stage);
                self.held.free(MemoryCategory::Buffers, bytes);
            }
            if is_divided {
                self.take_sum(stage);
            }
        }
        for stage in self.spec.layout.stages_of(index) {
            self.is_whole[stage] = false;
            match &self.sums {
                Some(sums) if stage != index => sums.store.release(stage, &mut self.held),
                _ => self.put(stage),
            }
        }
    }
}
