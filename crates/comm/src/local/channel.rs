//! The messages on their way from one rank to another.

use std::collections::{HashMap, HashSet};
use std::panic::Location;

use candle_core::Tensor;

/// A sent tensor: a copy on the receiver's device that nobody else can write to.
pub(super) struct Message {
    pub xs: Tensor,
    pub site: &'static Location<'static>,
}

/// The messages from one rank to another in one group. Sends and receives are numbered when they start, and equal
/// numbers match, whatever the order in which receives are waited for.
#[derive(Default)]
pub(super) struct Channel {
    num_sends: u64,
    num_recvs: u64,
    messages: HashMap<u64, Message>,
    given_up: HashSet<u64>,
}

impl Channel {
    pub fn send(&mut self, message: Message) {
        if !self.given_up.remove(&self.num_sends) {
            self.messages.insert(self.num_sends, message);
        }
        self.num_sends += 1;
    }

    /// The number of the message that a receive started now will get.
    pub fn start_recv(&mut self) -> u64 {
        self.num_recvs += 1;
        self.num_recvs - 1
    }

    pub fn take(&mut self, number: u64) -> Option<Message> {
        self.messages.remove(&number)
    }

    /// Drops message `number`, now or when it comes.
    pub fn give_up(&mut self, number: u64) {
        if self.messages.remove(&number).is_none() && number >= self.num_sends {
            self.given_up.insert(number);
        }
    }

    /// Messages that no receive asked for.
    pub fn num_undelivered(&self) -> u64 {
        self.num_sends.saturating_sub(self.num_recvs)
    }
}
