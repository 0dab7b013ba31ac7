//! The end of a group over MPI that ranks see.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use candle_core::{Device, Result, Tensor};

use super::collective::{Collective, Task};
use super::context::LastCalls;
use super::engine::{Activity, Job};
use super::exchange::Exchange;
use super::in_flight::{InFlight, Tensors};
use super::inbox::inbox;
use super::messages::{Batch, Incoming, Outgoing, copy_bytes, kind};
use super::rendezvous::{Barrier, NewGroup, Split};
use crate::call::describe;
use crate::call::{Call, Operation};
use crate::communicator::own_slice;
use crate::element::{self, Element, with_element};
use crate::{Communicator, Error, P2p, Pending, ReduceOp, call_site};

/// What all groups of a process share.
pub(super) struct Shared {
    pub world_rank: usize,
    pub deadline: Duration,
    pub last_calls: Arc<LastCalls>,
    pub jobs: Sender<Job>,
    /// Splits of one process take place one after the other: two at once, met in another order by another rank, would wait
    /// for each other inside MPI.
    pub splitting: Mutex<()>,
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

    fn in_flight<T>(&self, call: &str, tensors: Tensors) -> Arc<InFlight<T>> {
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

    /// Starts an operation without a tensor.
    #[track_caller]
    fn start<W: Task + 'static>(
        &self,
        operation: Operation,
        task: W,
    ) -> Result<Arc<InFlight<W::Output>>> {
        let call = Call {
            operation,
            tensor: None,
            site: call_site::current(),
        };
        let in_flight = self.in_flight(&call.to_string(), Tensors::default());
        let collective = Collective::new(in_flight.clone(), call, task);
        self.send(Job::Start(self.group, Box::new(collective)))?;
        Ok(in_flight)
    }

    #[track_caller]
    fn start_on_tensor(
        &self,
        operation: Operation,
        xs: &Tensor,
        place: Option<Tensor>,
    ) -> Result<Pending<Tensor>> {
        fn exchange<T: Element>(
            in_flight: &Arc<InFlight<Tensor>>,
            call: Call,
            xs: &Tensor,
        ) -> Result<Box<dyn Activity>> {
            let (operation, shape) = (call.operation.clone(), xs.shape().clone());
            let task = Exchange::<T>::new(in_flight.clone(), operation, shape);
            Ok(Box::new(Collective::new(in_flight.clone(), call, task)))
        }
        element::check(xs, self.shared.world_rank, &Device::Cpu)?;
        let call = Call {
            operation,
            tensor: Some((xs.shape().clone(), xs.dtype())),
            site: call_site::current(),
        };
        let input = Some(xs.detach());
        let in_flight = self.in_flight(&call.to_string(), Tensors { input, place });
        let activity = with_element!(xs.dtype(), exchange(&in_flight, call, xs))?;
        self.send(Job::Start(self.group, activity))?;
        Ok(Pending::from_work(Box::new(in_flight)))
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
    fn all_reduce(&self, xs: &Tensor, op: ReduceOp) -> Result<Pending<Tensor>> {
        self.start_on_tensor(Operation::AllReduce(op), xs, None)
    }

    #[track_caller]
    fn all_gather(&self, xs: &Tensor) -> Result<Pending<Tensor>> {
        self.start_on_tensor(Operation::AllGather, xs, None)
    }

    #[track_caller]
    fn reduce_scatter(&self, xs: &Tensor, op: ReduceOp) -> Result<Pending<Tensor>> {
        self.start_on_tensor(Operation::ReduceScatter(op), xs, None)
    }

    #[track_caller]
    fn all_reduce_in_place(&self, xs: &Tensor, op: ReduceOp) -> Result<Pending<Tensor>> {
        self.start_on_tensor(Operation::AllReduce(op), xs, Some(xs.detach()))
    }

    #[track_caller]
    fn reduce_scatter_in_place(&self, xs: &Tensor, op: ReduceOp) -> Result<Pending<Tensor>> {
        let slice = own_slice(self, &xs.detach())?;
        self.start_on_tensor(Operation::ReduceScatter(op), xs, Some(slice))
    }

    #[track_caller]
    fn all_gather_in_place(&self, xs: &Tensor) -> Result<Pending<Tensor>> {
        let slice = own_slice(self, xs)?;
        self.start_on_tensor(Operation::AllGather, &slice, Some(xs.detach()))
    }

    #[track_caller]
    fn broadcast(&self, xs: &Tensor, root: usize) -> Result<Pending<Tensor>> {
        self.start_on_tensor(Operation::Broadcast { root }, xs, None)
    }

    #[track_caller]
    fn all_to_all(&self, xs: &Tensor) -> Result<Pending<Tensor>> {
        self.start_on_tensor(Operation::AllToAll, xs, None)
    }

    #[track_caller]
    fn batch_send_recv(&self, ops: &[P2p<'_>]) -> Result<Pending<Vec<Tensor>>> {
        let site = call_site::current();
        let operation = Operation::Batch(describe(ops, &self.members).into());
        let call = format!("{operation} at {site}");
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for op in ops {
            match op {
                P2p::Send { xs, dst } => {
                    element::check(xs, self.shared.world_rank, &Device::Cpu)?;
                    sends.push(Outgoing {
                        to: *dst,
                        kind: kind(xs.dtype(), xs.dims()),
                        data: copy_bytes(xs)?,
                    });
                }
                P2p::Recv { shape, dtype, src } => receives.push(Incoming {
                    from: *src,
                    kind: kind(*dtype, shape.dims()),
                    inbox: inbox(shape, *dtype)?,
                }),
            }
        }
        let in_flight = self.in_flight(&call, Tensors::default());
        let only_sends = receives.is_empty();
        let batch = Batch {
            call,
            site: site.to_string(),
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

    #[track_caller]
    fn barrier(&self) -> Result<Pending<()>> {
        let in_flight = self.start(Operation::Barrier, Barrier)?;
        Ok(Pending::from_work(Box::new(in_flight)))
    }

    #[track_caller]
    fn split(&self, color: usize, key: usize) -> Result<Box<dyn Communicator>> {
        let _one_at_a_time = (self.shared.splitting.lock()).unwrap_or_else(PoisonError::into_inner);
        let in_flight = self.start(Operation::Split, Split { color, key })?;
        let NewGroup {
            index,
            members,
            rank,
        } = Pending::from_work(Box::new(in_flight)).wait()?;
        Ok(Box::new(Self {
            shared: self.shared.clone(),
            group: index,
            members,
            rank,
        }))
    }
}
