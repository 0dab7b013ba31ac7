//! A batch of messages, as a rank starts it and waits for it.

use std::sync::Arc;

use candle_core::Tensor;

use super::header::{Header, INLINE_BYTES};
use super::in_flight::InFlight;
use super::inbox::Inbox;
use crate::Error;
use crate::bytes;
use crate::element::{self, Element, with_element};

/// In front of data that are in the first message.
const HERE: u8 = 1;

/// In front of the size of data that follow.
const FOLLOWS: u8 = 0;

/// Messages that a rank starts together.
pub(super) struct Batch {
    pub call: String,
    pub site: String,
    pub sends: Vec<Outgoing>,
    pub receives: Vec<Incoming>,
    /// Whoever waits for what is received.
    pub in_flight: Arc<InFlight>,
}

impl Batch {
    pub fn fail(&self, error: Error) {
        self.in_flight.complete(Err(error));
    }
}

/// A message to group rank `to`: a copy of a tensor.
pub(super) struct Outgoing {
    pub to: usize,
    pub kind: String,
    pub data: Vec<u8>,
}

/// A message asked for, from group rank `from`.
pub(super) struct Incoming {
    pub from: usize,
    pub kind: String,
    pub inbox: Box<dyn Inbox>,
}

/// A copy of a contiguous tensor's bytes.
pub(super) fn copy_bytes(xs: &Tensor) -> candle_core::Result<Vec<u8>> {
    fn typed<T: Element>(xs: &Tensor) -> candle_core::Result<Vec<u8>> {
        element::read(xs, (0, xs.elem_count()), |xs: &[T]| bytes::of(xs).to_vec())
    }
    with_element!(xs.dtype(), typed(xs))
}

impl Outgoing {
    /// The first message, and the data that follow.
    pub fn into_head(self, site: &str) -> (Header, Option<Vec<u8>>) {
        let is_here = self.data.len() < INLINE_BYTES;
        let (mut data, rest) = match is_here {
            true => (vec![HERE], None),
            false => (vec![FOLLOWS], Some(self.data.len() as u64)),
        };
        match rest {
            None => data.extend(&self.data),
            Some(len) => data.extend(len.to_le_bytes()),
        }
        let header = Header {
            call: self.kind,
            site: site.to_string(),
            data,
        };
        (header, (!is_here).then_some(self.data))
    }
}

/// What a first message says about the data.
pub(super) enum Data<'a> {
    Here(&'a [u8]),
    Follow(usize),
}

/// Where the data of a message are; `None` if the first message is not one.
pub(super) fn data_of(head: &Header) -> Option<Data<'_>> {
    match head.data.split_first()? {
        (&HERE, data) => Some(Data::Here(data)),
        (&FOLLOWS, len) => Some(Data::Follow(
            u64::from_le_bytes(len.try_into().ok()?) as usize
        )),
        _ => None,
    }
}

/// What a batch has received, and who is missing.
pub(super) struct Received {
    pub call: String,
    pub site: String,
    in_flight: Arc<InFlight>,
    /// By receive: the tensor, or the world rank that it is to come from.
    entries: Vec<std::result::Result<Tensor, usize>>,
}

impl Received {
    /// Nothing yet, from these world ranks.
    pub fn new(batch: &Batch, from: Vec<usize>) -> Self {
        let received = Self {
            call: batch.call.clone(),
            site: batch.site.clone(),
            in_flight: batch.in_flight.clone(),
            entries: from.into_iter().map(Err).collect(),
        };
        received.tell();
        received
    }

    /// Completes entry `index`.
    pub fn set(&mut self, index: usize, xs: Tensor) {
        if let Some(entry) = self.entries.get_mut(index) {
            *entry = Ok(xs);
        }
        self.tell();
    }

    fn tell(&self) {
        if self.entries.iter().all(std::result::Result::is_ok) {
            let tensors = self.entries.iter().flatten().cloned().collect();
            self.in_flight.complete(Ok(tensors));
            return;
        }
        let missing = self.entries.iter().filter_map(|entry| entry.as_ref().err());
        self.in_flight.set_missing(missing.copied().collect());
    }

    pub fn fail(&self, error: Error) {
        self.in_flight.complete(Err(error));
    }
}
