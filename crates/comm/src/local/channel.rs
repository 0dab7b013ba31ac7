//! The messages of one rank to another one that have not met their receives.

use std::collections::VecDeque;
use std::panic::Location;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::memory::adopted::GivenAway;

/// A sent tensor: a copy on the receiver's device that nobody else can write to.
pub(super) struct Sent {
    pub tensor: GivenAway,
    /// When it is there.
    pub arrival: Instant,
    pub site: &'static Location<'static>,
}

/// Where a message comes to the receive that was started for it.
pub(super) type Letterbox = Arc<OnceLock<Sent>>;

/// The messages from one rank to another in one group: the first send that is started is for the first receive that is started,
/// and so on, whatever the order in which receives are waited for. At most one of the two has entries.
#[derive(Default)]
pub(super) struct Channel {
    /// No receive was started for these.
    pub sent: VecDeque<Sent>,
    /// No message was sent to these.
    receives: VecDeque<Letterbox>,
}

impl Channel {
    pub fn send(&mut self, message: Sent) {
        match self.receives.pop_front() {
            // If the receive was dropped, the message is too, here.
            Some(letterbox) => drop(letterbox.set(message)),
            None => self.sent.push_back(message),
        }
    }

    pub fn start_recv(&mut self) -> Letterbox {
        let letterbox = Letterbox::default();
        match self.sent.pop_front() {
            Some(message) => drop(letterbox.set(message)),
            None => self.receives.push_back(letterbox.clone()),
        }
        letterbox
    }
}
