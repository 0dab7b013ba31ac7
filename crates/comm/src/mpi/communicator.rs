//! The end of a group over MPI that ranks see.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;

use candle_core::{Device, Result, Tensor};

use super::channels::Outgoing;
use super::context::Shared;
use super::engine::Job;
use super::group::MpiGroup;
use super::in_flight::{MpiInFlight, Tensors};
use crate::reduction::element;
use crate::{Communicator, Error, Message, Operation, Pending, Request};

/// One rank's end of a group of processes.
pub(super) struct MpiCommunicator {
    pub shared: Arc<Shared>,
    pub jobs: Sender<Job>,
    pub group: Arc<MpiGroup>,
}

impl MpiCommunicator {
    fn send(&self, job: Job) -> Result<()> {
        let sent = self.jobs.send(job);
        sent.map_err(|_| Error::Backend("MPI has ended already".into()).into())
    }
}

impl Communicator for MpiCommunicator {
    fn rank(&self) -> usize {
        self.group.rank
    }

    fn world_size(&self) -> usize {
        self.group.members.len()
    }

    fn device(&self) -> &Device {
        &Device::Cpu
    }

    fn start(&self, request: &mut Request<'_>) -> Result<Pending<Vec<Tensor>>> {
        let (operation, call) = (request.operation, request.call.clone());
        let (tensors, sends) = match operation {
            Operation::Messages { messages, .. } => {
                for (_, dtype, _) in operation.receives() {
                    element::check_dtype(dtype)?;
                }
                let receivers = messages.iter().filter_map(|message| match message {
                    Message::Send { dst, .. } => Some(*dst),
                    Message::Recv { .. } => None,
                });
                let sends = receivers.zip(request.tensors);
                let sends = sends.map(|(to, xs)| Outgoing::new(to, xs, call.site.to_string()));
                (Tensors::default(), sends.collect::<Result<_>>()?)
            }
            _ => {
                let tensors = Tensors {
                    input: Some(operation.only_tensor(request.tensors)?.detach()),
                    place: request.place.map(Tensor::detach),
                };
                (tensors, Vec::new())
            }
        };
        let in_flight = MpiInFlight::new(self.shared.clone(), call, tensors);
        self.send(Job::Start(self.group.clone(), in_flight.clone(), sends))?;
        Ok(match operation.only_sends() {
            true => Pending::ready(Vec::new()),
            false => Pending::from_work(in_flight),
        })
    }

    fn subgroup_number(&self) -> i64 {
        self.shared.num_groups.fetch_add(1, Ordering::Relaxed)
    }

    fn subgroup(&self, ranks: &[usize], numbers: &[i64]) -> Result<Box<dyn Communicator>> {
        let group = Arc::new(self.group.part(ranks, numbers, &self.shared)?);
        self.send(Job::Open(group.clone()))?;
        Ok(Box::new(Self {
            shared: self.shared.clone(),
            jobs: self.jobs.clone(),
            group,
        }))
    }
}
