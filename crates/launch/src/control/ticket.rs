//! An operation in flight.

use std::sync::Arc;

use super::Operation;
use super::link::Link;

/// An operation in flight, from [`Control::begin`](super::Control::begin) until it is dropped.
///
/// The deadline counts only the time in which the rank is blocked: an operation that was started and goes on under
/// computation may last.
#[must_use = "the operation ends when its ticket is dropped"]
pub struct Ticket {
    link: Arc<Link>,
    id: u64,
}

impl Ticket {
    pub(super) fn new(link: Arc<Link>, operation: Operation) -> Self {
        let id = link.update(|activity, now| activity.begin(operation, now));
        Self { link, id }
    }

    /// The operation is started and the rank goes on.
    pub fn started(&self) {
        self.link
            .update(|activity, _| activity.set_blocked(self.id, None));
    }

    /// The rank is blocked until the operation ends.
    pub fn waits(&self) {
        self.link
            .update(|activity, now| activity.set_blocked(self.id, Some(now)));
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.link.update(|activity, now| activity.end(self.id, now));
    }
}

impl std::fmt::Debug for Ticket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ticket")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}
