//! The end of a group over MPI that ranks see.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use candle_core::{Device, Result, Tensor};

use super::collective::Collective;
use super::context::LastCalls;
use super::engine::{Activity, Job};
use super::in_flight::{InFlight, Tensors};
use super::inbox::inbox;
use super::messages::{Batch, Incoming, Outgoing, copy_bytes};
use crate::call::{Call, kind};
use crate::element::{self, Element, with_element};
use crate::{Communicator, Error, Message, Operation, Pending};

/// What all groups of a process share.
pub(super) struct Shared {
    pub world_rank: usize,
    pub deadline: Duration,
    pub last_calls: Arc<LastCalls>,
    pub jobs: Sender<Job>,
}

/// One rank's end of a group of processes.
pub(super) struct MpiCommunicator {
    shared: Arc<Shared>,
    /// Which of the process's groups.
    group: usize,
    /// The world ranks of the group, by group rank.
    members: Arc<[usize]>,
    /// This rank in the group.
    rank: usize,
}

impl MpiCommunicator {
    /// The end of the world's group.
    pub fn world(shared: Arc<Shared>, world_size: usize) -> Self {
        Self {
            group: 0,
            members: (0..world_size).collect(),
            rank: shared.world_rank,
            shared,
        }
    }

    fn in_flight(&self, call: &Call, tensors: Tensors) -> Arc<InFlight> {
        let Shared {
            world_rank,
            deadline,
            last_calls,
            ..
        } = &*self.shared;
        InFlight::new(
            (*world_rank, call.to_string()),
            (*deadline, last_calls.clone()),
            tensors,
        )
    }

    fn send(&self, job: Job) -> Result<()> {
        let sent = self.shared.jobs.send(job);
        sent.map_err(|_| Error::Backend("MPI has ended already".into()).into())
    }

    fn start_collective(
        &self,
        call: Call,
        xs: &Tensor,
        place: Option<&Tensor>,
    ) -> Result<Pending<Vec<Tensor>>> {
        fn typed<T: Element>(
            in_flight: &Arc<InFlight>,
            call: Call,
            xs: &Tensor,
        ) -> Result<Box<dyn Activity>> {
            let collective = Collective::<T>::new(in_flight.clone(), call, xs.shape().clone());
            Ok(Box::new(collective))
        }
        let tensors = Tensors {
            input: Some(xs.detach()),
            place: place.map(Tensor::detach),
        };
        let in_flight = self.in_flight(&call, tensors);
        let activity = with_element!(xs.dtype(), typed(&in_flight, call, xs))?;
        self.send(Job::Start(self.group, activity))?;
        Ok(Pending::from_work(Box::new(in_flight)))
    }

    fn start_messages(
        &self,
        call: Call,
        messages: &[Message],
        tensors: &[Tensor],
    ) -> Result<Pending<Vec<Tensor>>> {
        let mut tensors = tensors.iter();
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for message in messages {
            match message {
                Message::Send { dst } => {
                    if let Some(xs) = tensors.next() {
                        sends.push(Outgoing {
                            to: *dst,
                            kind: kind(xs.dtype(), xs.shape()),
                            data: copy_bytes(xs)?,
                        });
                    }
                }
                Message::Recv { shape, dtype, src } => receives.push(Incoming {
                    from: *src,
                    kind: kind(*dtype, shape),
                    inbox: inbox(shape, *dtype)?,
                }),
            }
        }
        let in_flight = self.in_flight(&call, Tensors::default());
        let only_sends = receives.is_empty();
        let batch = Batch {
            call: call.to_string(),
            site: call.site.to_string(),
            sends,
            receives,
            in_flight: in_flight.clone(),
        };
        self.send(Job::Messages(self.group, batch))?;
        Ok(match only_sends {
            true => Pending::ready(Vec::new()),
            false => Pending::from_work(Box::new(in_flight)),
        })
    }
}

impl Communicator for MpiCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.members.len()
    }

    fn device(&self) -> &Device {
        &Device::Cpu
    }

    #[track_caller]
    fn start(
        &self,
        operation: &Operation,
        xs: &[Tensor],
        place: Option<&Tensor>,
    ) -> Result<Pending<Vec<Tensor>>> {
        let call = Call::new(operation, xs, &self.members);
        for xs in xs {
            element::check(xs, self.shared.world_rank, &Device::Cpu)?;
        }
        match operation {
            Operation::Messages { messages, .. } => self.start_messages(call, messages, xs),
            _ => self.start_collective(call, operation.only_tensor(xs)?, place),
        }
    }

    fn subgroup(&self, ranks: &[usize]) -> Result<Box<dyn Communicator>> {
        let (reply, replied) = channel();
        self.send(Job::Split(self.group, ranks.to_vec(), reply))?;
        let deadline = self.shared.deadline;
        let group = replied.recv_timeout(deadline).map_err(|_| {
            let (rank, secs) = (self.shared.world_rank, deadline.as_secs_f64());
            Error::Backend(format!(
                "split on rank {rank} is not complete after {secs} s\n\
                 hint: a rank splits one group at a time, in the same order as the others"
            ))
        })??;
        let rank = ranks.iter().position(|rank| *rank == self.rank);
        Ok(Box::new(Self {
            shared: self.shared.clone(),
            group,
            members: ranks.iter().map(|rank| self.members[*rank]).collect(),
            rank: rank.unwrap_or(0),
        }))
    }
}
