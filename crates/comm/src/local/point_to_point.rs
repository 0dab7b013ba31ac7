//! Messages between two ranks.

use std::collections::{HashMap, HashSet};
use std::panic::Location;
use std::sync::Arc;

use candle_core::{DType, Result, Shape, Tensor};

use super::world::{LastCall, Polled, State, World};
use super::{LocalCommunicator, work};
use crate::adopted::GivenAway;
use crate::call::{Call, kind};
use crate::error::group_name;
use crate::pending::Work;
use crate::{Error, Message, Pending};

/// A sent tensor: a copy on the receiver's device that nobody else can write to.
pub(super) struct Sent {
    xs: GivenAway,
    site: &'static Location<'static>,
}

/// The messages from one rank to another in one group. Sends and receives are numbered when they start, and equal
/// numbers match, whatever the order in which receives are waited for.
#[derive(Default)]
pub(super) struct Channel {
    num_sends: u64,
    num_recvs: u64,
    messages: HashMap<u64, Sent>,
    given_up: HashSet<u64>,
}

impl Channel {
    pub fn send(&mut self, message: Sent) {
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

    pub fn take(&mut self, number: u64) -> Option<Sent> {
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

/// A started receive.
struct Recv {
    src: usize,
    number: u64,
    shape: Shape,
    dtype: DType,
    received: Option<Tensor>,
}

/// A rank's claim to the messages of a started batch.
struct BatchInFlight {
    world: Arc<World>,
    group: usize,
    members: Arc<[usize]>,
    rank: usize,
    call: Call,
    recvs: Vec<Recv>,
}

impl LocalCommunicator {
    pub(super) fn start_messages(
        &self,
        call: Call,
        messages: &[Message],
        sends: &[Tensor],
    ) -> Result<Pending<Vec<Tensor>>> {
        let world_rank = self.world_rank();
        let destinations = messages.iter().filter_map(|message| match message {
            Message::Send { dst } => Some(*dst),
            Message::Recv { .. } => None,
        });
        let copy = |(dst, xs): (usize, &Tensor)| {
            let device = self.world.device(self.members[dst]);
            let xs = GivenAway::new(work::copy(xs, device)?);
            Ok((
                dst,
                Sent {
                    xs,
                    site: call.site,
                },
            ))
        };
        let sent = destinations.zip(sends).map(copy);
        let sent = sent.collect::<Result<Vec<_>>>()?;
        self.world.make_current(world_rank)?;
        let receivers: Vec<usize> = sent.iter().map(|(dst, _)| self.members[*dst]).collect();

        let mut state = self.world.lock();
        World::check_alive(&state, world_rank, &call)?;
        state.ranks[world_rank].last = Some(LastCall {
            group: self.group,
            seq: None,
            call: call.clone(),
        });
        let channels = &mut state.groups[self.group].channels;
        for (dst, sent) in sent {
            channels.entry((self.rank, dst)).or_default().send(sent);
        }
        let mut recvs = Vec::new();
        for message in messages {
            if let Message::Recv { shape, dtype, src } = message {
                let number = channels.entry((*src, self.rank)).or_default().start_recv();
                recvs.push(Recv {
                    src: *src,
                    number,
                    shape: shape.clone(),
                    dtype: *dtype,
                    received: None,
                });
            }
        }
        drop(state);
        self.world.notify(&receivers);
        if recvs.is_empty() {
            return Ok(Pending::ready(Vec::new()));
        }
        let (world, members) = (self.world.clone(), self.members.clone());
        let in_flight = BatchInFlight {
            world,
            group: self.group,
            members,
            rank: self.rank,
            call,
            recvs,
        };
        Ok(Pending::from_work(Box::new(in_flight)))
    }
}

impl BatchInFlight {
    /// Takes the messages that have come; ready when none is missing.
    fn poll(&mut self, state: &mut State) -> Polled<()> {
        let channels = &mut state.groups[self.group].channels;
        let mut missing = Vec::new();
        for recv in self.recvs.iter_mut().filter(|recv| recv.received.is_none()) {
            let Some(message) = channels
                .entry((recv.src, self.rank))
                .or_default()
                .take(recv.number)
            else {
                missing.push(self.members[recv.src]);
                continue;
            };
            let Sent { xs, site } = message;
            let xs = xs.tensor().clone();
            let (src, dst) = (self.members[recv.src], self.members[self.rank]);
            if xs.shape() != &recv.shape || xs.dtype() != recv.dtype {
                let sent = format!("sent {} at {site}", kind(xs.dtype(), xs.shape()));
                let asked = kind(recv.dtype, &recv.shape);
                let asked = format!("receives {asked} at {}", self.call.site);
                let group = group_name(&self.members);
                return Polled::Failed(Error::MessageMismatch {
                    group,
                    sender: (src, sent),
                    receiver: (dst, asked),
                });
            }
            recv.received = Some(xs);
        }
        if missing.is_empty() {
            Polled::Ready(())
        } else {
            Polled::Missing(missing)
        }
    }
}

impl Work<Vec<Tensor>> for BatchInFlight {
    fn wait(mut self: Box<Self>) -> Result<Vec<Tensor>> {
        let (world, call) = (self.world.clone(), self.call.clone());
        world.wait(self.members[self.rank], &call, |state| self.poll(state))?;
        Ok(self
            .recvs
            .into_iter()
            .filter_map(|recv| recv.received)
            .collect())
    }

    fn abandon(self: Box<Self>) {
        let mut state = self.world.lock();
        let channels = &mut state.groups[self.group].channels;
        for recv in &self.recvs {
            channels
                .entry((recv.src, self.rank))
                .or_default()
                .give_up(recv.number);
        }
    }
}
