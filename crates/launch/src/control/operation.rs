//! An operation between ranks, as reports name it, and while it is in flight.

use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Failure;
use super::activity::OperationState;
use super::link::Link;

/// A group of ranks with an id that all its members call it by and no other group has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankGroup {
    /// The id, as "world" or "world/3:1".
    pub id: String,
    /// The world ranks of the members.
    pub members: Vec<usize>,
}

impl RankGroup {
    /// The group of all ranks.
    pub fn world(world_size: usize) -> Self {
        let id = "world".to_string();
        let members = (0..world_size).collect();
        Self { id, members }
    }
}

impl std::fmt::Display for RankGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "group {:?}", self.members)
    }
}

/// An operation between ranks: what a report says a rank was doing.
#[derive(Debug, Clone)]
pub struct Operation {
    /// Whose operation it is.
    pub group: Arc<RankGroup>,
    /// Its number in the group, from 0; messages between two ranks have none.
    pub seq: Option<u64>,
    /// What was called, on what: `all_reduce(sum) of f32 [4]`. Equal on all members if `seq` is there.
    pub call: String,
    /// Where it was called.
    pub site: &'static Location<'static>,
}

impl std::fmt::Display for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at {} ({}", self.call, self.site, self.group)?;
        if let Some(seq) = self.seq {
            write!(f, ", operation number {seq}")?;
        }
        f.write_str(")")
    }
}

/// An operation in flight, from [`Control::begin`](super::Control::begin) until it is dropped, which says that it is complete.
/// Several may be in flight, in one group and in several.
///
/// The deadline counts only the time in which the rank, or its GPU, is blocked: an operation that was started and goes on under
/// computation may last.
#[must_use = "the operation ends when its ticket is dropped"]
pub struct Ticket {
    link: Arc<Link>,
    id: u64,
}

impl Ticket {
    pub(super) fn new(link: Arc<Link>, operation: Operation) -> Self {
        let id = link.begin(operation);
        Self { link, id }
    }

    /// The operation is started and the rank goes on.
    pub fn started(&self) {
        self.set(|_| OperationState::Started);
    }

    /// The operation is on a GPU, behind what that has to do first, and the rank goes on. [`gpu_waits`](Self::gpu_waits) when the
    /// GPU has come to it.
    pub fn queued(&self) {
        self.set(|_| OperationState::Queued);
    }

    /// The rank is blocked until the operation ends.
    pub fn waits(&self) {
        self.set(OperationState::Blocked);
    }

    /// The rank's GPU is blocked until the operation ends; the rank may go on.
    pub fn gpu_waits(&self) {
        self.set(OperationState::GpuBlocked);
    }

    fn set(&self, state: impl FnOnce(Duration) -> OperationState) {
        self.link
            .update(|activity, now| activity.set(self.id, state(now)));
    }

    /// Why the run ends, once it does: the operation may never be complete.
    pub fn failure(&self) -> Option<Failure> {
        self.link.failure()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.link.update(|activity, now| activity.end(self.id, now));
    }
}
