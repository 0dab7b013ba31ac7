//! Activations that wait away from the device: which of them are on it.

use std::collections::HashSet;

use super::bytes::HeldBytes;
use crate::memory::MemoryCategory;
use crate::offload::{Lane, OffloadPlace};

/// Activations that wait away from the device.
pub(super) struct PlannedWaiting {
    /// As what they count where they are.
    place: MemoryCategory,
    /// Bytes on the device for those that stay there.
    room: u64,
    kept: HashSet<WaitingFor>,
    /// How many wait, by lane.
    num_waiting: [usize; 2],
    /// For how many there is room where they wait.
    num_items: usize,
}

/// The use of an activation that waits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct WaitingFor {
    pub lane: Lane,
    pub micro_batch: usize,
    /// The block which it is the input of, or whose input it is the gradient of.
    pub block: usize,
}

/// Activations of a lane that are on the device while they wait: the last one that came, and another one that comes or goes.
const ON_DEVICE: usize = 2;

impl PlannedWaiting {
    /// None yet, at `place` but for those that have `room` on the device; `None` if that is where all are.
    pub fn new(place: OffloadPlace<'_>, room: u64) -> Option<Self> {
        Some(Self {
            place: place.category()?,
            room,
            kept: HashSet::new(),
            num_waiting: [0; 2],
            num_items: 0,
        })
    }

    pub fn put(&mut self, what: WaitingFor, bytes: usize, held: &mut HeldBytes) {
        if bytes as u64 <= self.room {
            self.room -= bytes as u64;
            self.kept.insert(what);
            held.hold(MemoryCategory::Activations, bytes);
            return;
        }
        let in_lane = &mut self.num_waiting[what.lane as usize];
        *in_lane += 1;
        if *in_lane <= ON_DEVICE {
            held.hold(MemoryCategory::Activations, bytes);
        }
        if self.num_waiting.iter().sum::<usize>() > self.num_items {
            self.num_items += 1;
            held.hold(self.place, bytes);
        }
    }

    pub fn take(&mut self, what: WaitingFor, bytes: usize, held: &mut HeldBytes) {
        if self.kept.remove(&what) {
            self.room += bytes as u64;
            held.free(MemoryCategory::Activations, bytes);
            return;
        }
        let in_lane = &mut self.num_waiting[what.lane as usize];
        if *in_lane <= ON_DEVICE {
            held.free(MemoryCategory::Activations, bytes);
        }
        *in_lane = in_lane.saturating_sub(1);
    }
}
