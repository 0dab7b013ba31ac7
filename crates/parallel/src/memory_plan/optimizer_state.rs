//! State and masters, wherever they are between updates: what of them is where a rank computes.

use candle_core::Result;

use super::PlannedUpdate;
use super::held::Held;
use crate::memory::MemoryCategory;
use crate::optimizer::{BucketShape, Offload, next_in};
use crate::params::{RankSpec, ReplicaGroups};

/// The buckets of one rank.
pub(super) struct OptimizerState {
    /// Bytes of each.
    bytes: Vec<usize>,
    /// Of each, the one that is updated after it.
    next: Vec<usize>,
    place: Place,
    /// The bucket that was fetched and not yet updated.
    ahead: Option<usize>,
    /// The one that is on its way back.
    behind: Option<usize>,
}

#[derive(Clone, Copy, PartialEq)]
enum Place {
    Resident,
    Host,
    File,
}

impl OptimizerState {
    /// What is held before the first update is held from now on.
    pub fn new(
        spec: &RankSpec,
        groups: &ReplicaGroups,
        update: &PlannedUpdate<'_>,
        held: &mut Held,
    ) -> Result<Self> {
        let buckets = spec.layout.buckets.iter();
        let bytes = buckets.map(|bucket| {
            let len = groups.own_range(bucket.len).len();
            let first = bucket.slots.first();
            let name = first.map_or("", |slot| spec.params[slot.param].name.as_str());
            Ok(BucketShape::of_rule(update.rule, len, bucket.dtype, name)?.num_bytes())
        });
        let bytes: Vec<usize> = bytes.collect::<Result<_>>()?;
        let place = match update.offload {
            Offload::Host if update.on_gpu => Place::Host,
            Offload::None | Offload::Host => Place::Resident,
            Offload::Nvme(_) => Place::File,
        };
        if place == Place::Resident {
            held.hold(MemoryCategory::Optimizer, bytes.iter().sum());
        }
        Ok(Self {
            next: next_in(&spec.layout.in_forward_order()),
            bytes,
            place,
            ahead: None,
            behind: None,
        })
    }

    /// The update of a bucket.
    pub fn update(&mut self, bucket: usize, held: &mut Held) {
        if self.place == Place::Resident {
            return;
        }
        if self.ahead != Some(bucket) {
            let other = self.ahead.take();
            self.free(other, held);
            self.fetch(bucket, held);
        }
        self.ahead = None;
        let next = self.next[bucket];
        if next != bucket {
            self.fetch(next, held);
            self.ahead = Some(next);
        }
        let written = self.behind.replace(bucket);
        self.free(written, held);
    }

    /// All that was updated is written.
    pub fn finish(&mut self, held: &mut Held) {
        if self.place == Place::File {
            let written = self.behind.take();
            self.free(written, held);
        }
    }

    fn fetch(&mut self, bucket: usize, held: &mut Held) {
        // The thread of a file reads after it has written.
        self.finish(held);
        held.hold(MemoryCategory::Optimizer, self.bytes[bucket]);
    }

    fn free(&self, bucket: Option<usize>, held: &mut Held) {
        if let Some(bucket) = bucket {
            held.free(MemoryCategory::Optimizer, self.bytes[bucket]);
        }
    }
}
