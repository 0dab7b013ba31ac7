//! The end of a group over MPI that ranks see.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::mpsc::Sender;
use std::time::Duration;

use candle_core::{DType, Device, Result, Tensor};

use super::addresses::Addresses;
use super::collective::Collective;
use super::context::{LastCalls, Opened};
use super::engine::{Activity, Job};
use super::in_flight::{InFlight, Tensors};
use super::inbox::inbox;
use super::messages::{Batch, Incoming, Outgoing, copy_bytes};
use super::native::NativeGroup;
use crate::call::{Call, kind};
use crate::element::{Element, with_element};
use crate::{Communicator, Error, Message, Operation, Pending, ReduceOp, Request};

/// What all groups of a process share.
pub(super) struct Shared {
    pub world_rank: usize,
    pub deadline: Duration,
    pub last_calls: Arc<LastCalls>,
    pub jobs: Sender<Job>,
    /// The groups that this rank has been in, with the world; each has its number here.
    pub num_groups: AtomicI64,
    /// The highest tag that MPI allows.
    pub max_tag: c_int,
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
    /// Where MPI adds by itself.
    native: Option<NativeGroup>,
}

impl MpiCommunicator {
    /// The end of the world's group.
    pub fn world(shared: Arc<Shared>, world_size: usize, native: Option<NativeGroup>) -> Self {
        Self {
            group: 0,
            members: (0..world_size).collect(),
            rank: shared.world_rank,
            native,
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
        Ok(Pending::from_work(in_flight))
    }

    fn start_messages(
        &self,
        call: Call,
        messages: &[Message<()>],
        tensors: &[Tensor],
    ) -> Result<Pending<Vec<Tensor>>> {
        let mut tensors = tensors.iter();
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for message in messages {
            match message {
                Message::Send { dst, .. } => {
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
            false => Pending::from_work(in_flight),
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

    fn bytes_per_reduced_value(&self, op: ReduceOp, dtype: DType) -> usize {
        let is_half = matches!(dtype, DType::BF16 | DType::F16);
        match self.native {
            // As what they are added in.
            Some(_) if op == ReduceOp::Sum && is_half => DType::F32.size_in_bytes(),
            _ => dtype.size_in_bytes(),
        }
    }

    fn start(&self, request: &mut Request<'_>) -> Result<Pending<Vec<Tensor>>> {
        let (call, xs) = (request.call.clone(), request.tensors);
        match request.operation {
            Operation::Messages { messages, .. } => self.start_messages(call, messages, xs),
            operation => self.start_collective(call, operation.only_tensor(xs)?, request.place),
        }
    }

    fn subgroup_number(&self) -> i64 {
        self.shared.num_groups.fetch_add(1, Ordering::Relaxed)
    }

    fn subgroup(&self, ranks: &[usize], numbers: &[i64]) -> Result<Box<dyn Communicator>> {
        let own = ranks.iter().position(|rank| *rank == self.rank);
        let Some((rank, number)) = own.and_then(|rank| Some((rank, *numbers.get(rank)?))) else {
            let message = format!("split: this rank is not in its own group {ranks:?}");
            return Err(Error::Backend(message).into());
        };
        let members: Arc<[usize]> = ranks.iter().map(|rank| self.members[*rank]).collect();
        let addresses = Addresses::new(members.clone(), numbers, self.shared.max_tag)?;
        let group = number as usize;
        let native = match self.native {
            // Each new group is named by its lowest rank.
            Some(whole) => {
                let color = members.iter().min().copied().unwrap_or(0);
                Some(whole.split(color, rank, self.shared.deadline)?)
            }
            None => None,
        };
        let opened = Opened {
            addresses,
            rank,
            native,
        };
        self.send(Job::Open(group, opened))?;
        Ok(Box::new(Self {
            shared: self.shared.clone(),
            group,
            members,
            rank,
            native,
        }))
    }
}
