//! Weights that are here for the passes of their blocks only (ZeRO-3, arXiv:1910.02054, section 5.3), and updated ones on their way.

use std::collections::BTreeSet;

use super::{Action, Item, Lowering};

/// Where the weights of each bucket are.
pub(super) struct Weights {
    residence: Vec<Residence>,
    /// Buckets of which this rank has its part of a second copy.
    pub has_copy: Vec<bool>,
    /// Blocks whose updated weights have come in these passes.
    are_awaited: BTreeSet<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Residence {
    Absent,
    Fetching,
    Gathering,
    Present,
}

impl Weights {
    pub fn new(num_buckets: usize) -> Self {
        Self {
            residence: vec![Residence::Absent; num_buckets],
            has_copy: vec![false; num_buckets],
            are_awaited: BTreeSet::new(),
        }
    }

    pub fn begin_passes(&mut self) {
        self.are_awaited.clear();
    }
}

impl Lowering<'_> {
    /// Does `pass` with the weights of a block in place; meanwhile those of `next` come.
    pub(super) fn with_weights(
        &mut self,
        block: usize,
        next: Option<usize>,
        pass: impl FnOnce(&mut Self),
    ) {
        if self.setup.groups.spreads_weights() && self.weights.are_awaited.insert(block) {
            self.push(Action::AwaitBlock(block as u32));
        }
        let needed = self.uses.gathered(block).to_vec();
        self.start_weights(&needed);
        for &index in &needed {
            self.arrive(index);
        }
        let kept = next.map_or(&[][..], |next| self.uses.gathered(next));
        let kept = kept.to_vec();
        if self.setup.groups.config.overlap {
            self.start_weights(&kept);
        }
        pass(self);
        for index in needed {
            if !kept.contains(&index) {
                self.weights.residence[index] = Residence::Absent;
                self.push(Action::Free(index as u32));
            }
        }
    }

    fn start_weights(&mut self, buckets: &[usize]) {
        for &index in buckets {
            if self.weights.residence[index] != Residence::Absent {
                continue;
            }
            let bucket = index as u32;
            self.weights.residence[index] = Residence::Gathering;
            if self.weights.has_copy[index] {
                self.push(Action::GatherCopy(bucket));
            } else if self.setup.groups.offloads_weights {
                self.push(Action::Fetch(Item::Weights(bucket)));
                self.weights.residence[index] = Residence::Fetching;
            } else {
                self.push(Action::Gather(bucket));
            }
        }
    }

    fn arrive(&mut self, index: usize) {
        let (groups, bucket) = (self.setup.groups, index as u32);
        match self.weights.residence[index] {
            Residence::Present => return,
            // The slice has come.
            Residence::Fetching if groups.shard.world_size() > 1 => {
                self.push(Action::Gather(bucket));
            }
            _ => {}
        }
        self.weights.residence[index] = Residence::Present;
        if groups.secondary.is_some() && !self.weights.has_copy[index] {
            self.weights.has_copy[index] = true;
            self.push(Action::ArriveAndCopy(bucket));
        } else {
            self.push(Action::Arrive(bucket));
        }
    }

    /// Frees all weights but the slices.
    pub(super) fn free_all_weights(&mut self) {
        if self.setup.groups.shards_weights() {
            self.weights.residence.fill(Residence::Absent);
            self.weights.has_copy.fill(false);
            self.push(Action::FreeAll);
        }
    }
}
