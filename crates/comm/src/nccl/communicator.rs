//! One rank's end of a group over NCCL.

use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::{DType, Device, Result, Tensor};

use super::group::{Group, wait_settled};
use super::in_flight::{Finish, Held, InFlight, Kind};
use super::joining::new_stream;
use super::reduction::Reduction;
use super::session::Session;
use super::transfer::{Motion, Transfer, enqueue, unwritten};
use crate::call::Call;
use crate::device::empty;
use crate::element;
use crate::single::Single;
use crate::{Communicator, Error, HalfSums, Message, Operation, Pending, ReduceOp};

/// One rank's end of a group over NCCL; the rank's GPU is its own.
///
/// When the last group of a rank is dropped, their operations are completed and NCCL's communicators freed, within the deadline.
pub struct NcclCommunicator {
    pub(super) session: Arc<Session>,
    pub(super) group: Arc<Group>,
    pub(super) device: Device,
    pub(super) half_sums: HalfSums,
}

impl NcclCommunicator {
    /// Starts transfers, all under way together; `finish` makes the result of what they have written.
    fn launch(
        &self,
        call: &Call,
        transfers: &[Transfer],
        (finish, kind): (Finish, Kind),
    ) -> Result<Pending<Vec<Tensor>>> {
        let (session, group) = (&self.session, &self.group);
        session.state.check(call)?;
        session.compute.context().bind_to_thread().w()?;
        let tensors = transfers.iter();
        let tensors = tensors.flat_map(|transfer| [transfer.from.clone(), transfer.to.clone()]);
        let tensors = tensors.collect();
        let steps = transfers
            .iter()
            .map(|transfer| transfer.located(&session.compute));
        let steps = steps.collect::<Result<Vec<_>>>()?;
        let held = Held::new(tensors, &session.compute, &group.stream)?;
        let (seq, launched) = {
            let mut state = group.lock();
            let handle = state.handle()?;
            let seq = state.next_seq;
            state.next_seq += 1;
            // SAFETY: the steps are of tensors that `held` keeps, and the group's stream waits for what makes them.
            #[allow(unsafe_code)]
            let launched = unsafe { enqueue(&steps, handle, &group.stream) };
            (
                seq,
                launched.and_then(|()| wait_settled(handle, &session.state, call)),
            )
        };
        if let Err(error) = launched {
            session.fail(error.clone());
            return Err(Error::Backend(format!(
                "{call} failed on rank {}: {error}",
                session.state.rank
            ))
            .into());
        }
        let call = format!("{call} ({}, operation number {seq})", group.name());
        let in_flight = InFlight::new((session, group), call, held, (finish, kind))?;
        Ok(Pending::from_work(Box::new(in_flight)))
    }

    /// Starts a collective whose result goes to `place` if that is given. NCCL writes it there; reductions that it does not make
    /// by itself are copied.
    fn start_collective(
        &self,
        call: &Call,
        xs: &Tensor,
        place: Option<&Tensor>,
    ) -> Result<Pending<Vec<Tensor>>> {
        let operation = &call.operation;
        element::check_reduces(operation, xs.dtype(), &self.device)?;
        let dims = operation.output_dims(xs.shape(), self.world_size());
        if xs.elem_count() == 0 {
            let nothing = empty(dims, xs.dtype(), &self.device)?;
            return Ok(Pending::ready(vec![nothing]));
        }
        let reduction = match operation.reduce_op() {
            Some(op) => Reduction::new(op, xs.dtype(), self.half_sums),
            None => Reduction::Plain,
        };
        let (written, copied) = match reduction {
            Reduction::Plain => (place, None),
            _ => (None, place.cloned()),
        };
        let (mut transfers, mut outputs) = (Vec::new(), Vec::new());
        for xs in reduction.inputs(xs)? {
            let ys = match written {
                Some(place) => place.clone(),
                None => unwritten(dims.as_slice(), xs.dtype(), &self.device)?,
            };
            outputs.push(ys.clone());
            transfers.extend(self.transfers(operation, xs, ys)?);
        }
        let finish = move || {
            let result = reduction.finish(&outputs)?;
            let Some(place) = copied else {
                return Ok(vec![result]);
            };
            place
                .flatten_all()?
                .slice_set(&result.flatten_all()?, 0, 0)?;
            Ok(vec![place])
        };
        self.launch(call, &transfers, (Box::new(finish), Kind::Collective))
    }

    /// What NCCL does for a collective from `xs` to `ys`.
    fn transfers(&self, operation: &Operation, xs: Tensor, ys: Tensor) -> Result<Vec<Transfer>> {
        let motion = match operation {
            Operation::AllReduce(op) => Motion::AllReduce(*op),
            Operation::ReduceScatter(op) => Motion::ReduceScatter(*op),
            Operation::Broadcast { root } => Motion::Broadcast(*root),
            Operation::AllGather | Operation::Split => Motion::AllGather,
            // All to all: the others are started elsewhere.
            _ => {
                let len = xs.dim(0)? / self.world_size();
                let mut transfers = Vec::new();
                for peer in 0..self.world_size() {
                    for (motion, xs) in [(Motion::Send(peer), &xs), (Motion::Recv(peer), &ys)] {
                        let part = xs.narrow(0, peer * len, len)?;
                        transfers.push(Transfer::one_sided(motion, part));
                    }
                }
                return Ok(transfers);
            }
        };
        let (from, to) = (xs, ys);
        Ok(vec![Transfer { motion, from, to }])
    }

    fn start_messages(
        &self,
        call: &Call,
        messages: &[Message],
        tensors: &[Tensor],
    ) -> Result<Pending<Vec<Tensor>>> {
        let mut tensors = tensors.iter();
        let (mut transfers, mut received) = (Vec::new(), Vec::new());
        for message in messages {
            match message {
                Message::Send { dst } => {
                    if let Some(xs) = tensors.next().filter(|xs| xs.elem_count() > 0) {
                        let copy = xs.detach().force_contiguous()?;
                        transfers.push(Transfer::one_sided(Motion::Send(*dst), copy));
                    }
                }
                Message::Recv { shape, dtype, src } if shape.elem_count() > 0 => {
                    let ys = unwritten(shape, *dtype, &self.device)?;
                    transfers.push(Transfer::one_sided(Motion::Recv(*src), ys.clone()));
                    received.push(ys);
                }
                Message::Recv { shape, dtype, .. } => {
                    received.push(empty(shape.clone(), *dtype, &self.device)?);
                }
            }
        }
        if transfers.is_empty() {
            return Ok(Pending::ready(received));
        }
        let kind = match received.is_empty() {
            true => Kind::Send,
            false => Kind::Collective,
        };
        self.launch(call, &transfers, (Box::new(move || Ok(received)), kind))
    }

    fn start_barrier(&self, call: &Call) -> Result<Pending<Vec<Tensor>>> {
        let flag = Tensor::zeros(1, DType::U8, &self.device)?;
        let transfer = Transfer::one_sided(Motion::AllReduce(ReduceOp::Sum), flag);
        self.launch(
            call,
            &[transfer],
            (Box::new(|| Ok(Vec::new())), Kind::Barrier),
        )
    }
}

impl Communicator for NcclCommunicator {
    fn rank(&self) -> usize {
        self.group.rank
    }

    fn world_size(&self) -> usize {
        self.group.members.len()
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn bytes_per_reduced_value(&self, op: ReduceOp, dtype: DType) -> usize {
        Reduction::new(op, dtype, self.half_sums).bytes_per_value(dtype)
    }

    #[track_caller]
    fn start(
        &self,
        operation: &Operation,
        xs: &[Tensor],
        place: Option<&Tensor>,
    ) -> Result<Pending<Vec<Tensor>>> {
        let call = Call::new(operation, xs, &self.group.members);
        for xs in xs {
            element::check(xs, self.session.state.rank, &self.device)?;
        }
        match operation {
            Operation::Messages { messages, .. } => self.start_messages(&call, messages, xs),
            Operation::Barrier => self.start_barrier(&call),
            _ => self.start_collective(&call, operation.only_tensor(xs)?, place),
        }
    }

    fn subgroup(&self, ranks: &[usize]) -> Result<Box<dyn Communicator>> {
        let (Some(rank), Some(color)) = (
            ranks.iter().position(|rank| *rank == self.group.rank),
            ranks.iter().min(),
        ) else {
            candle_core::bail!("split: this rank is not in its own group {ranks:?}");
        };
        let members = ranks.iter().map(|rank| self.group.members[*rank]).collect();
        let stream = new_stream(&self.session)?;
        let split = self
            .group
            .split(*color, (members, rank), stream, &self.session.state);
        let added = split.and_then(|group| group.map(|group| self.session.add(group)).transpose());
        match added {
            Ok(Some(group)) => Ok(Box::new(Self {
                session: self.session.clone(),
                group,
                device: self.device.clone(),
                half_sums: self.half_sums,
            })),
            Ok(None) => Ok(Box::new(Single(self.device.clone()))),
            Err(error) => {
                self.session.fail(error.clone());
                Err(error.into())
            }
        }
    }

    fn check(&self) -> Result<()> {
        Ok(self.session.state.check(&format_args!("what was read"))?)
    }
}
