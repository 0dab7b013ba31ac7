//! The end of a group over MPI that ranks see.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;

use candle_core::{DType, Device, Result, Tensor};

use super::channels::{Incoming, Outgoing};
use super::context::Shared;
use super::engine::{Job, Start};
use super::group::Group;
use super::in_flight::{InFlight, Tensors};
use crate::call::Call;
use crate::{Communicator, Error, Message, Operation, Pending, ReduceOp, Request, element};

/// One rank's end of a group of processes.
pub(super) struct MpiCommunicator {
    pub shared: Arc<Shared>,
    pub jobs: Sender<Job>,
    pub group: Arc<Group>,
}

impl MpiCommunicator {
    fn send(&self, job: Job) -> Result<()> {
        let sent = self.jobs.send(job);
        sent.map_err(|_| Error::Backend("MPI has ended already".into()).into())
    }
}

/// What starts these messages, of which those that are sent have these tensors.
fn start_messages(call: &Call, messages: &[Message<()>], tensors: &[Tensor]) -> Result<Start> {
    let mut tensors = tensors.iter();
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    for message in messages {
        match message {
            Message::Send { dst, .. } => {
                if let Some(xs) = tensors.next() {
                    sends.push(Outgoing::new(*dst, xs, call.site.to_string())?);
                }
            }
            Message::Recv { shape, dtype, src } => {
                element::check_dtype(*dtype)?;
                receives.push(Incoming {
                    from: *src,
                    shape: shape.clone(),
                    dtype: *dtype,
                });
            }
        }
    }
    Ok(Start::Messages(sends, receives))
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

    fn bytes_per_reduced_value(&self, op: ReduceOp, dtype: DType) -> usize {
        match self.group.native {
            // As what they are added in.
            Some(_) if op == ReduceOp::Sum => element::accumulated(dtype).size_in_bytes(),
            _ => dtype.size_in_bytes(),
        }
    }

    fn start(&self, request: &mut Request<'_>) -> Result<Pending<Vec<Tensor>>> {
        let (call, xs) = (request.call.clone(), request.tensors);
        let (tensors, start) = match request.operation {
            Operation::Messages { messages, .. } => {
                (Tensors::default(), start_messages(&call, messages, xs)?)
            }
            operation => {
                let xs = operation.only_tensor(xs)?;
                let tensors = Tensors {
                    input: Some(xs.detach()),
                    place: request.place.map(Tensor::detach),
                };
                (tensors, Start::Collective(xs.shape().clone(), xs.dtype()))
            }
        };
        let is_sent_only = matches!(&start, Start::Messages(_, receives) if receives.is_empty());
        let in_flight = InFlight::new(self.shared.clone(), call, tensors);
        self.send(Job::Start(self.group.clone(), in_flight.clone(), start))?;
        Ok(match is_sent_only {
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
