//! Messages between two ranks.

use std::sync::Arc;

use candle_core::{DType, Result, Shape, Tensor};

use super::call::{Call, Operation};
use super::channel::Message;
use super::world::{LastCall, Progress, State, World};
use super::{LocalCommunicator, element, report, work};
use crate::pending::Work;
use crate::{Error, P2p, Pending, call_site};

/// A started receive.
struct Recv {
    src: usize,
    number: u64,
    shape: Shape,
    dtype: DType,
    received: Option<Tensor>,
}

/// A rank's claim to the messages of a started batch.
struct BatchTicket {
    world: Arc<World>,
    group: usize,
    members: Arc<[usize]>,
    rank: usize,
    call: Call,
    recvs: Vec<Recv>,
}

impl LocalCommunicator {
    #[track_caller]
    pub(super) fn start_batch(&self, ops: &[P2p<'_>]) -> Result<Pending<Vec<Tensor>>> {
        let operation = Operation::Batch(describe(ops, &self.members).into());
        let call = Call {
            operation,
            tensor: None,
            site: call_site::current(),
        };
        let world_rank = self.world_rank();
        self.world.delay(world_rank);
        let mut messages = Vec::new();
        for op in ops {
            if let P2p::Send { xs, dst } = op {
                element::check(xs, world_rank, &self.device)?;
                messages.push((
                    *dst,
                    Message {
                        xs: work::copy(xs, self.world.device(self.members[*dst]))?,
                        site: call.site,
                    },
                ));
            }
        }
        self.world.make_current(world_rank)?;
        let receivers: Vec<usize> = messages.iter().map(|(dst, _)| self.members[*dst]).collect();

        let mut state = self.world.lock();
        World::check_alive(&state, world_rank, &call)?;
        state.ranks[world_rank].last = Some(LastCall {
            group: self.group,
            seq: None,
            call: call.clone(),
        });
        let channels = &mut state.groups[self.group].channels;
        for (dst, message) in messages {
            channels.entry((self.rank, dst)).or_default().send(message);
        }
        let mut recvs = Vec::new();
        for op in ops {
            if let P2p::Recv { shape, dtype, src } = op {
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
        let ticket = BatchTicket {
            world,
            group: self.group,
            members,
            rank: self.rank,
            call,
            recvs,
        };
        Ok(Pending::from_work(Box::new(ticket)))
    }
}

pub(crate) fn describe(ops: &[P2p<'_>], members: &[usize]) -> String {
    let entries: Vec<String> = ops
        .iter()
        .map(|op| match op {
            P2p::Send { xs, dst } => format!(
                "send {} {:?} to rank {}",
                xs.dtype().as_str(),
                xs.dims(),
                members[*dst]
            ),
            P2p::Recv { shape, dtype, src } => {
                format!(
                    "receive {} {:?} from rank {}",
                    dtype.as_str(),
                    shape.dims(),
                    members[*src]
                )
            }
        })
        .collect();
    entries.join(", ")
}

impl BatchTicket {
    /// Takes the messages that have come; ready when none is missing.
    fn look(&mut self, state: &mut State) -> Progress<()> {
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
            let Message { xs, site } = message;
            let (src, dst) = (self.members[recv.src], self.members[self.rank]);
            if xs.shape() != &recv.shape || xs.dtype() != recv.dtype {
                let sent = format!("sent {} {:?} at {site}", xs.dtype().as_str(), xs.dims());
                let dtype = recv.dtype.as_str();
                let asked = format!(
                    "receives {dtype} {:?} at {}",
                    recv.shape.dims(),
                    self.call.site
                );
                let group = report::group_name(&self.members);
                return Progress::Failed(Error::MessageMismatch {
                    group,
                    sender: (src, sent),
                    receiver: (dst, asked),
                });
            }
            recv.received = Some(xs);
        }
        if missing.is_empty() {
            Progress::Ready(())
        } else {
            Progress::Missing(missing)
        }
    }
}

impl Work<Vec<Tensor>> for BatchTicket {
    fn wait(mut self: Box<Self>) -> Result<Vec<Tensor>> {
        let (world, call) = (self.world.clone(), self.call.clone());
        world.wait(self.members[self.rank], &call, |state| self.look(state))?;
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
