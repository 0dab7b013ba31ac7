//! Messages between two ranks.

use std::time::Instant;

use candle_core::{Result, Tensor};

use super::LocalCommunicator;
use super::channel::{Letterbox, Sent};
use super::copy::copy;
use super::slot::Polled;
use crate::error::group_name;
use crate::memory::adopted::GivenAway;
use crate::operation::call::{Call, kind};
use crate::operation::pending::Work;
use crate::{Error, Message, Pending, Request};

/// A started batch that receives something. Who drops it drops its messages.
struct BatchInFlight {
    comm: LocalCommunicator,
    call: Call,
    /// One for each receive.
    letterboxes: Vec<Letterbox>,
}

impl LocalCommunicator {
    pub(super) fn start_messages(
        &self,
        request: &Request<'_>,
        messages: &[Message<()>],
    ) -> Result<Pending<Vec<Tensor>>> {
        let destinations = messages.iter().filter_map(|message| match message {
            Message::Send { dst, .. } => Some(*dst),
            Message::Recv { .. } => None,
        });
        let to_send = |(dst, xs): (usize, &Tensor)| {
            let copy = copy(xs, self.world.device(self.members[dst]))?;
            let (tensor, site) = (GivenAway::new(copy), request.call.site);
            let arrival = Instant::now() + self.world.config.latency;
            Ok((
                dst,
                Sent {
                    tensor,
                    arrival,
                    site,
                },
            ))
        };
        let sent = destinations.zip(request.tensors).map(to_send);
        let sent = sent.collect::<Result<Vec<_>>>()?;
        self.world.make_current(self.world_rank())?;
        let receivers: Vec<usize> = sent.iter().map(|(dst, _)| self.members[*dst]).collect();

        let mut state = self.world.lock();
        state.begin(self.world_rank(), request)?;
        let (group, rank, channels) = (self.group, self.rank, &mut state.channels);
        for (dst, sent) in sent {
            channels.entry((group, rank, dst)).or_default().send(sent);
        }
        let receives = request.operation.receives();
        let letterboxes = receives.map(|(.., src)| {
            let channel = channels.entry((group, src, rank)).or_default();
            channel.start_recv()
        });
        let letterboxes: Vec<Letterbox> = letterboxes.collect();
        drop(state);
        self.world.notify(&receivers);
        if letterboxes.is_empty() {
            return Ok(Pending::ready(Vec::new()));
        }
        Ok(Pending::from_work(BatchInFlight {
            comm: self.clone(),
            call: request.call.clone(),
            letterboxes,
        }))
    }
}

impl BatchInFlight {
    /// The received tensors when none is missing.
    fn poll(&self) -> std::result::Result<Polled<Vec<Tensor>>, Error> {
        let members = &self.comm.members;
        let (mut received, mut missing) = (Vec::new(), Vec::new());
        let receives = self.call.operation.receives();
        for ((shape, dtype, src), letterbox) in receives.zip(&self.letterboxes) {
            let Some(sent) = letterbox.get() else {
                missing.push(members[src]);
                continue;
            };
            let xs = &sent.tensor.xs;
            if xs.shape() != shape || xs.dtype() != dtype {
                let sent = format!("sent {} at {}", kind(xs.dtype(), xs.shape()), sent.site);
                let asked = format!("receives {} at {}", kind(dtype, shape), self.call.site);
                return Err(Error::MessageMismatch {
                    group: group_name(members),
                    sender: (members[src], sent),
                    receiver: (self.comm.world_rank(), asked),
                });
            }
            received.push(xs.clone());
        }
        Ok(match missing.is_empty() {
            true => Polled::Ready(received),
            false => Polled::Missing(missing),
        })
    }
}

impl Work for BatchInFlight {
    fn wait(self: Box<Self>) -> Result<Vec<Tensor>> {
        let (world, rank) = (&self.comm.world, self.comm.world_rank());
        let received = world.wait(rank, &self.call, None, |_| self.poll())?;
        let sent = self
            .letterboxes
            .iter()
            .filter_map(|letterbox| letterbox.get());
        if let Some(last) = sent.map(|sent| sent.arrival).max() {
            std::thread::sleep(last.saturating_duration_since(Instant::now()));
        }
        Ok(received)
    }

    fn abandon(self: Box<Self>) {}
}
