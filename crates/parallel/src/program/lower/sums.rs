//! Sums of gradients: written to, divided or reduced over replicas, and where they are away fetched and put back.

use std::collections::{BTreeMap, VecDeque};

use super::{Action, Item, Lowering, Setup};
use crate::params::{Bucket, Sharing, Slot};
use crate::placement::{Gradient, intersect};

/// Where the gradients of each bucket are.
#[derive(Clone, Default)]
pub(crate) struct SumPlaces {
    /// Divided buckets that are being written to; in lowering also those that are away.
    pub is_whole: Vec<bool>,
    /// Divided buckets whose sums over the ranks are under way.
    pub dividing: VecDeque<usize>,
    /// Other buckets whose sums over the ranks are under way.
    pub is_started: Vec<bool>,
    /// Buckets whose sum is over, with its squares known.
    pub is_settled: Vec<bool>,
    /// Sums that are here though they are kept away: nothing is written to them now.
    pub idle: Vec<usize>,
}

impl SumPlaces {
    /// No bucket is here or under way.
    pub fn new(num_buckets: usize) -> Self {
        Self {
            is_whole: vec![false; num_buckets],
            is_started: vec![false; num_buckets],
            is_settled: vec![false; num_buckets],
            ..Self::default()
        }
    }
}

/// The gradients of each bucket in the passes of a step and after them.
pub(super) struct Sums {
    pub places: SumPlaces,
    /// Micro-batches whose weight gradients are still to come, by block.
    owed: BTreeMap<usize, usize>,
    /// Whether all passes are over.
    passes_are_over: bool,
    /// Whether sums were put back for which nobody has waited.
    is_unflushed: bool,
}

impl Sums {
    pub fn new(num_buckets: usize) -> Self {
        Self {
            places: SumPlaces::new(num_buckets),
            owed: BTreeMap::new(),
            passes_are_over: false,
            is_unflushed: false,
        }
    }

    pub fn begin_passes(&mut self, blocks: impl Iterator<Item = usize>, num_micro_batches: usize) {
        self.owed = blocks.map(|block| (block, num_micro_batches)).collect();
        self.passes_are_over = false;
    }

    /// Whether no block owes a bucket anything.
    fn is_complete(&self, bucket: &Bucket) -> bool {
        let is_owed = |block: &usize| self.owed.get(block).is_none_or(|owed| *owed > 0);
        self.passes_are_over || !bucket.blocks.iter().any(is_owed)
    }
}

impl Lowering<'_> {
    /// Makes or fetches the buckets of gradients that a block writes to.
    pub(super) fn write_gradients(&mut self, block: usize) {
        for index in self.uses.written(block).to_vec() {
            self.take_whole(index);
        }
    }

    fn take_whole(&mut self, index: usize) {
        self.sums.places.is_settled[index] = false;
        let is_divided = self.setup.groups.shards_gradients();
        if !(is_divided || self.setup.sums_are_away)
            || std::mem::replace(&mut self.sums.places.is_whole[index], true)
        {
            return;
        }
        if is_divided {
            self.push(Action::MakeGradients(index as u32));
        } else {
            self.fetch_sum(index);
        }
    }

    /// A block has computed the gradients of its weights for a micro-batch.
    pub(super) fn block_done(&mut self, block: usize) {
        if let Some(owed) = self.sums.owed.get_mut(&block) {
            *owed = owed.saturating_sub(1);
        }
        let (spec, groups) = (self.setup.spec, self.setup.groups);
        // Backward passes go from the last block to the first: a bucket's first block is the last to write to it.
        let is_last =
            |index: &usize| spec.layout.gradient_bucket(*index).blocks.first() == Some(&block);
        let mut last = self.uses.written(block).to_vec();
        last.retain(is_last);
        if groups.shards_gradients() {
            for index in last {
                self.divide(index);
            }
            return;
        }
        let overlaps = groups.config.overlap && spec.num_replicas > 1;
        let buckets = spec.layout.buckets.iter().enumerate();
        for (index, bucket) in buckets.filter(|(_, bucket)| overlaps && bucket.tie.is_none()) {
            // In their order, which is the same on every replica.
            if !self.sums.is_complete(bucket) {
                break;
            }
            self.start_sum(index);
            for earlier in 0..index {
                if self.setup.sums_are_away && self.sums.places.is_started[earlier] {
                    self.settle(earlier);
                }
            }
        }
        for index in last {
            if !self.sums.places.is_started[index]
                && std::mem::take(&mut self.sums.places.is_whole[index])
            {
                self.note_squares(index);
                self.put_sum(index);
            }
        }
    }

    /// Fetches a sum that may be written to next; idle ones of other blocks go.
    fn fetch_sum(&mut self, index: usize) {
        if !self.setup.sums_are_away {
            return;
        }
        let idle = &mut self.sums.places.idle;
        if let Some(place) = idle.iter().position(|of| *of == index) {
            idle.swap_remove(place);
            return;
        }
        let layout = &self.setup.spec.layout;
        let block = |of: usize| layout.gradient_bucket(of).block;
        let going: Vec<usize> = idle
            .extract_if(.., |of| block(*of) != block(index))
            .collect();
        going.into_iter().for_each(|of| self.put_away(of));
        self.push(Action::Fetch(Item::Sum(index as u32)));
    }

    fn put_sum(&mut self, index: usize) {
        if self.setup.sums_are_away {
            self.sums.places.idle.push(index);
        }
    }

    fn put_away(&mut self, index: usize) {
        self.push(Action::Put(Item::Sum(index as u32)));
        self.sums.is_unflushed = true;
    }

    /// All sums that are away go there.
    pub(super) fn flush_sums(&mut self) {
        let idle = std::mem::take(&mut self.sums.places.idle);
        idle.into_iter().for_each(|index| self.put_away(index));
        if std::mem::take(&mut self.sums.is_unflushed) {
            self.push(Action::FlushSums);
        }
    }

    /// Notes the squares of what no other rank adds to: it need not come back for them.
    fn note_squares(&mut self, index: usize) {
        let Some(bucket) = self.setup.spec.layout.buckets.get(index) else {
            return;
        };
        let num_ranks = if self.setup.groups.shards_gradients() {
            self.setup.groups.replicate.world_size()
        } else {
            self.setup.spec.num_replicas
        };
        let is_own = bucket.sharing == Sharing::None && bucket.tie.is_none();
        if is_own && num_ranks == 1 && self.sums.is_complete(bucket) {
            self.sums.places.is_settled[index] = true;
            self.push(Action::Square(index as u32));
        }
    }

    /// Starts to sum a micro-batch's gradients of a bucket over the ranks that divide it; while they overlap with passes one is under way.
    fn divide(&mut self, index: usize) {
        if std::mem::take(&mut self.sums.places.is_whole[index]) {
            self.push(Action::Reduce(index as u32));
            self.sums.places.dividing.push_back(index);
            self.finish_dividing(usize::from(self.setup.groups.config.overlap));
        }
    }

    fn finish_dividing(&mut self, num_left: usize) {
        while self.sums.places.dividing.len() > num_left {
            let Some(index) = self.sums.places.dividing.pop_front() else {
                return;
            };
            self.fetch_sum(index);
            self.push(Action::AddReduced(index as u32));
            let places = &self.sums.places;
            let is_last = !places.dividing.contains(&index) && !places.is_whole[index];
            if self.setup.sums_are_away && is_last {
                self.note_squares(index);
            }
            self.put_sum(index);
        }
    }

    fn start_sum(&mut self, index: usize) {
        if !self.sums.places.is_settled[index]
            && !std::mem::replace(&mut self.sums.places.is_started[index], true)
        {
            self.take_whole(index);
            self.push(Action::Reduce(index as u32));
        }
    }

    /// The sums after the passes, of which two are under way at a time, and the norm.
    pub(super) fn reduce_sums(&mut self) {
        let layout = &self.setup.spec.layout;
        let is_divided = self.setup.groups.shards_gradients();
        self.sums.passes_are_over = true;
        // Buckets that were written to after the last pass of their first block: by hand.
        for index in (0..layout.num_gradient_buckets()).filter(|_| is_divided) {
            self.divide(index);
        }
        self.finish_dividing(0);
        for index in 0..=layout.buckets.len() {
            for stage in layout.stages_of(index).filter(|_| !is_divided) {
                self.start_sum(stage);
            }
            if let Some(earlier) = index.checked_sub(1) {
                self.settle(earlier);
            }
        }
        self.flush_sums();
        let copies = compared_copies(&self.setup).into_iter();
        let copies: Vec<Item> = copies.map(|index| Item::Sum(index as u32)).collect();
        copies
            .iter()
            .for_each(|item| self.push(Action::Fetch(*item)));
        self.push(Action::Norm);
        copies
            .iter()
            .for_each(|item| self.push(Action::Drop(*item)));
        self.sums.places.is_settled.fill(false);
    }

    /// Ends the sum of a bucket.
    fn settle(&mut self, index: usize) {
        if std::mem::replace(&mut self.sums.places.is_settled[index], true) {
            return;
        }
        let stages: Vec<usize> = self.setup.spec.layout.stages_of(index).collect();
        for &stage in &stages {
            if self.setup.groups.shards_gradients() {
                self.fetch_sum(stage);
            }
            self.sums.places.is_started[stage] = false;
            self.sums.places.is_whole[stage] = false;
        }
        self.push(Action::Settle(index as u32));
        for stage in stages {
            if stage == index {
                self.put_sum(stage);
            } else if self.setup.sums_are_away {
                self.push(Action::Drop(Item::Sum(stage as u32)));
            }
        }
    }
}

/// Buckets of gradients that tensor-parallel ranks compare after their sums, as they have copies, if sums are away.
pub(crate) fn compared_copies(setup: &Setup<'_>) -> Vec<usize> {
    let is_copy = |bucket: &Bucket, slot: &Slot| {
        let param = &setup.spec.params[slot.param];
        let own = setup.groups.own_range(bucket.len);
        param.replicated == Some(Gradient::Complete)
            && !param.shared.is_empty()
            && !intersect(&slot.range, &own).is_empty()
    };
    let buckets = setup.spec.layout.buckets.iter().enumerate();
    let copies = buckets.filter(|(_, bucket)| {
        let mut slots = bucket.slots.iter();
        setup.sums_are_away && slots.any(|slot| is_copy(bucket, slot))
    });
    copies.map(|(index, _)| index).collect()
}
