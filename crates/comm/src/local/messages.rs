//! Messages between two ranks.

use std::time::Instant;

use candle_core::{DType, Result, Shape, Tensor};

use super::LocalCommunicator;
use super::channel::{Letterbox, Sent};
use super::copy::copy;
use super::slot::Polled;
use crate::error::group_name;
use crate::memory::adopted::GivenAway;
use crate::operation::call::{Call, kind};
use crate::operation::pending::Work;
use crate::{Error, Message, Pending, Request};

/// A started receive.
struct Recv {
    src: usize,
    shape: Shape,
    dtype: DType,
    letterbox: Letterbox,
}

/// The receives of a started batch. Who drops them drops their messages.
struct BatchInFlight {
    comm: LocalCommunicator,
    call: Call,
    recvs: Vec<Recv>,
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
            let arrival = Instant::now() + self.world.latency;
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
        let recvs = messages.iter().filter_map(|message| match message {
            Message::Send { .. } => None,
            Message::Recv { shape, dtype, src } => Some(Recv {
                src: *src,
                shape: shape.clone(),
                dtype: *dtype,
                letterbox: channels
                    .entry((group, *src, rank))
                    .or_default()
                    .start_recv(),
            }),
        });
        let recvs: Vec<Recv> = recvs.collect();
        drop(state);
        self.world.notify(&receivers);
        if recvs.is_empty() {
            return Ok(Pending::ready(Vec::new()));
        }
        let (comm, call) = (self.clone(), request.call.clone());
        Ok(Pending::from_work(BatchInFlight { comm, call, recvs }))
    }
}

impl BatchInFlight {
    /// The received tensors when none is missing.
    fn poll(&self) -> std::result::Result<Polled<Vec<Tensor>>, Error> {
        let members = &self.comm.members;
        let (mut received, mut missing) = (Vec::new(), Vec::new());
        for recv in &self.recvs {
            let Some(sent) = recv.letterbox.get() else {
                missing.push(members[recv.src]);
                continue;
            };
            let xs = &sent.tensor.xs;
            if xs.shape() != &recv.shape || xs.dtype() != recv.dtype {
                let sent = format!("sent {} at {}", kind(xs.dtype(), xs.shape()), sent.site);
                let asked = kind(recv.dtype, &recv.shape);
                let asked = format!("receives {asked} at {}", self.call.site);
                return Err(Error::MessageMismatch {
                    group: group_name(members),
                    sender: (members[recv.src], sent),
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
        let sent = self.recvs.iter().filter_map(|recv| recv.letterbox.get());
        if let Some(last) = sent.map(|sent| sent.arrival).max() {
            std::thread::sleep(last.saturating_duration_since(Instant::now()));
        }
        Ok(received)
    }

    fn abandon(self: Box<Self>) {}
}
