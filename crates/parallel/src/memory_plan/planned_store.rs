//! Items that are on the device for their uses only: what of them is there.

use std::collections::HashSet;

use super::held::PlannedBytes;
use crate::memory::MemoryCategory;
use crate::offload::{Lane, OffloadPlace};

/// The items of one rank that are changed in turn.
pub(super) struct PlannedStore {
    category: MemoryCategory,
    /// Bytes of each.
    bytes: Vec<usize>,
    /// The item that was fetched and not yet changed.
    ahead: Option<usize>,
    /// The one that is on its way back.
    behind: Option<usize>,
}

impl PlannedStore {
    /// Items that are held at `place` from now on; `None` if that is the device.
    pub fn new(
        place: OffloadPlace<'_>,
        category: MemoryCategory,
        bytes: Vec<usize>,
        held: &mut PlannedBytes,
    ) -> Option<Self> {
        held.hold(place.category()?, bytes.iter().sum());
        Some(Self {
            category,
            bytes,
            ahead: None,
            behind: None,
        })
    }

    /// The change of an item begins; `next` is changed after it.
    pub fn begin(&mut self, item: usize, next: Option<usize>, held: &mut PlannedBytes) {
        if self.ahead != Some(item) {
            let other = self.ahead.take();
            self.free(other, held);
            self.fetch(item, held);
        }
        self.ahead = next;
        if let Some(next) = self.ahead {
            self.fetch(next, held);
        }
    }

    /// An item goes and is not written back.
    pub fn release(&self, item: usize, held: &mut PlannedBytes) {
        self.free(Some(item), held);
    }

    /// The change of an item ends: it goes back.
    pub fn end(&mut self, item: usize, held: &mut PlannedBytes) {
        let written = self.behind.replace(item);
        self.free(written, held);
    }

    /// All that was changed is written.
    pub fn finish(&mut self, held: &mut PlannedBytes) {
        let written = self.behind.take();
        self.free(written, held);
    }

    /// An item comes that was not on its way.
    pub fn fetch(&self, item: usize, held: &mut PlannedBytes) {
        held.hold(self.category, self.bytes[item]);
    }

    fn free(&self, item: Option<usize>, held: &mut PlannedBytes) {
        if let Some(item) = item {
            held.free(self.category, self.bytes[item]);
        }
    }
}

/// Sums of gradients that are away.
pub(super) struct PlannedSums {
    pub store: PlannedStore,
    /// Of each bucket the block that is the last to add to it.
    blocks: Vec<usize>,
    /// Put back and not away yet.
    idle: Vec<usize>,
}

impl PlannedSums {
    pub fn new(store: PlannedStore, blocks: Vec<usize>) -> Self {
        Self {
            store,
            blocks,
            idle: Vec::new(),
        }
    }

    /// A sum comes; those of other blocks go.
    pub fn take(&mut self, bucket: usize, held: &mut PlannedBytes) {
        if let Some(place) = self.idle.iter().position(|of| *of == bucket) {
            self.idle.swap_remove(place);
            return;
        }
        let (blocks, block) = (&self.blocks, self.blocks[bucket]);
        let going: Vec<usize> = (self.idle.extract_if(.., |of| blocks[*of] != block)).collect();
        going.into_iter().for_each(|of| self.store.end(of, held));
        self.store.fetch(bucket, held);
    }

    pub fn put(&mut self, bucket: usize) {
        self.idle.push(bucket);
    }

    /// All go, and are written.
    pub fn finish(&mut self, held: &mut PlannedBytes) {
        let going = std::mem::take(&mut self.idle);
        going.into_iter().for_each(|of| self.store.end(of, held));
        self.store.finish(held);
    }
}

/// Activations that wait away from the device.
pub(super) struct PlannedWaiting {
    /// As what they count where they are.
    place: MemoryCategory,
    /// Bytes on the device for those that stay there.
    room: u64,
    kept: HashSet<WaitingFor>,
    lanes: [PlannedLane; 2],
}

/// What an activation that waits is for.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct WaitingFor {
    pub lane: Lane,
    pub micro_batch: usize,
    /// The block which it is the input of, or whose input it is the gradient of.
    pub block: usize,
}

#[derive(Default)]
struct PlannedLane {
    num_waiting: usize,
    /// For so many there is room.
    num_items: usize,
}

/// Of those that wait in a lane so many are on the device: the last one that came, and another one that comes or goes.
const ON_DEVICE: usize = 2;

impl PlannedWaiting {
    /// None yet, at `place` but for those that have `room` on the device; `None` if that is where all are.
    pub fn new(place: OffloadPlace<'_>, room: u64) -> Option<Self> {
        Some(Self {
            place: place.category()?,
            room,
            kept: HashSet::new(),
            lanes: Default::default(),
        })
    }

    pub fn put(&mut self, what: WaitingFor, bytes: usize, held: &mut PlannedBytes) {
        if bytes as u64 <= self.room {
            self.room -= bytes as u64;
            self.kept.insert(what);
            held.hold(MemoryCategory::Activations, bytes);
            return;
        }
        let in_lane = &mut self.lanes[what.lane as usize];
        in_lane.num_waiting += 1;
        if in_lane.num_waiting <= ON_DEVICE {
            held.hold(MemoryCategory::Activations, bytes);
        }
        if in_lane.num_waiting > in_lane.num_items {
            in_lane.num_items += 1;
            held.hold(self.place, bytes);
        }
    }

    pub fn take(&mut self, what: WaitingFor, bytes: usize, held: &mut PlannedBytes) {
        if self.kept.remove(&what) {
            self.room += bytes as u64;
            held.free(MemoryCategory::Activations, bytes);
            return;
        }
        let in_lane = &mut self.lanes[what.lane as usize];
        if in_lane.num_waiting <= ON_DEVICE {
            held.free(MemoryCategory::Activations, bytes);
        }
        in_lane.num_waiting = in_lane.num_waiting.saturating_sub(1);
    }
}
