//! One rank's end of a group over NCCL.

use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::{DType, Device, Result, Tensor};

use super::group::{NcclGroup, wait_settled};
use super::in_flight::{Held, NcclInFlight};
use super::reduction::Reduction;
use super::run::new_stream;
use super::session::Session;
use super::transfer::{Motion, NcclTransfer, enqueue};
use crate::memory::device::{empty, unwritten};
use crate::process_group::unconnected::Unconnected;
use crate::reduction::element;
use crate::{Communicator, Error, HalfSums, Message, Operation, Pending, ReduceOp, Request};

/// One rank's end of a group over NCCL; the rank's GPU is its own.
///
/// When the last group of a rank is dropped, their operations are completed and NCCL's communicators freed, within the deadline.
pub struct NcclCommunicator {
    pub(super) session: Arc<Session>,
    pub(super) group: Arc<NcclGroup>,
    pub(super) device: Device,
    pub(super) half_sums: HalfSums,
}

impl NcclCommunicator {
    /// A step from one tensor to another.
    fn transfer(&self, motion: Motion, from: &Tensor, to: &Tensor) -> Result<NcclTransfer> {
        NcclTransfer::new(motion, from, to, &self.session.run.compute)
    }

    /// Starts transfers, all under way together.
    fn launch(
        &self,
        transfers: &[NcclTransfer],
        request: &mut Request<'_>,
    ) -> Result<Pending<Vec<Tensor>>> {
        let (session, group) = (&self.session, &self.group);
        let run = &session.run;
        let call = &request.call;
        run.check(call)?;
        let tensors = transfers.iter().flat_map(NcclTransfer::tensors).collect();
        let held = Held::new(tensors, &run.compute, &group.stream)?;
        let launched = {
            let state = group.lock();
            let handle = state.handle()?;
            // SAFETY: the steps are of tensors that `held` keeps, and the group's stream waits for what makes them.
            #[allow(unsafe_code)]
            let launched = unsafe { enqueue(transfers, handle, &group.stream) };
            launched.and_then(|()| wait_settled(handle, run, call))
        };
        if let Err(error) = launched {
            run.fail(error.clone());
            let rank = run.rank;
            return Err(Error::Backend(format!("{call} failed on rank {rank}: {error}")).into());
        }
        let in_flight = NcclInFlight::new((session, group), request, held)?;
        Ok(Pending::from_work(in_flight))
    }

    /// Starts a collective whose result goes to the request's place if that is given. NCCL writes it there; reductions that it does
    /// not make by itself are copied.
    fn start_collective(&self, request: &mut Request<'_>) -> Result<Pending<Vec<Tensor>>> {
        let operation = request.operation;
        let xs = operation.only_tensor(request.tensors)?;
        let (num_ranks, dims) = (self.world_size(), request.call.output_dims(self.rank()));
        // What this rank gets, if that is nothing.
        let nothing = match dims.iter().product() {
            0usize => Some(empty(dims.as_slice(), xs.dtype(), &self.device)?),
            _ => None,
        };
        if request.call.kinds[0].1.elem_count() == 0 {
            return Ok(Pending::ready(nothing.into_iter().collect()));
        }
        let reduction = match operation.reduce_op() {
            Some(op) => Reduction::new(op, xs.dtype(), self.half_sums),
            None => Reduction::Plain,
        };
        let (written, copied) = match reduction {
            Reduction::Plain => (request.place, None),
            _ => (None, request.place.cloned()),
        };
        let (mut transfers, mut outputs) = (Vec::new(), Vec::new());
        for xs in reduction.inputs(xs)? {
            let ys = match written {
                Some(place) => place.clone(),
                // Where there is no result nothing is written.
                None if nothing.is_some() => xs.clone(),
                None => unwritten(dims.as_slice(), xs.dtype(), &self.device)?,
            };
            transfers.extend(self.transfers(operation, &xs, &ys)?);
            outputs.push(ys);
        }
        if transfers.is_empty() {
            return Ok(Pending::ready(nothing.into_iter().collect()));
        }
        let pending = self.launch(&transfers, request)?;
        Ok(pending.map(move |_| {
            if let Some(nothing) = nothing {
                return Ok(vec![nothing]);
            }
            let result = reduction.finish(&outputs, num_ranks)?;
            let Some(place) = copied else {
                return Ok(vec![result]);
            };
            place
                .flatten_all()?
                .slice_set(&result.flatten_all()?, 0, 0)?;
            Ok(vec![place])
        }))
    }

    /// What NCCL does for a collective from `xs` to `ys`.
    fn transfers(
        &self,
        operation: &Operation,
        xs: &Tensor,
        ys: &Tensor,
    ) -> Result<Vec<NcclTransfer>> {
        let motion = match operation {
            Operation::AllReduce(op) => Motion::AllReduce(*op),
            Operation::ReduceScatter(op) => Motion::ReduceScatter(*op),
            Operation::Broadcast { root } => Motion::Broadcast(*root),
            Operation::AllGather | Operation::Split => Motion::AllGather,
            Operation::Reduce { op, root } => Motion::Reduce(*op, *root),
            Operation::Scatter { root, sizes } => {
                return self.deal((Motion::Send, xs), (Motion::Recv, ys), (*root, sizes));
            }
            Operation::Gather { root, sizes } => {
                return self.deal((Motion::Recv, ys), (Motion::Send, xs), (*root, sizes));
            }
            // All to all: the others are started elsewhere.
            _ => {
                let len = xs.dim(0)? / self.world_size();
                let mut transfers = Vec::new();
                for peer in 0..self.world_size() {
                    for (motion, xs) in [(Motion::Send(peer), xs), (Motion::Recv(peer), ys)] {
                        let part = xs.narrow(0, peer * len, len)?;
                        transfers.push(self.transfer(motion, &part, &part)?);
                    }
                }
                return Ok(transfers);
            }
        };
        Ok(vec![self.transfer(motion, xs, ys)?])
    }

    /// A scatter or a gather: what the root does with the rows of each rank of the first tensor, and each rank with the second one.
    fn deal(
        &self,
        (of_root, whole): (fn(usize) -> Motion, &Tensor),
        (of_rank, own): (fn(usize) -> Motion, &Tensor),
        (root, sizes): (usize, &[usize]),
    ) -> Result<Vec<NcclTransfer>> {
        let mut transfers = Vec::new();
        let mut first = 0;
        for (peer, size) in sizes.iter().enumerate() {
            if self.rank() == root && *size > 0 {
                let part = whole.narrow(0, first, *size)?;
                transfers.push(self.transfer(of_root(peer), &part, &part)?);
            }
            first += size;
        }
        if sizes[self.rank()] > 0 {
            transfers.push(self.transfer(of_rank(root), own, own)?);
        }
        Ok(transfers)
    }

    fn start_messages(
        &self,
        messages: &[Message<()>],
        request: &mut Request<'_>,
    ) -> Result<Pending<Vec<Tensor>>> {
        let mut tensors = request.tensors.iter();
        let (mut transfers, mut received) = (Vec::new(), Vec::new());
        for message in messages {
            match message {
                Message::Send { dst, .. } => {
                    if let Some(xs) = tensors.next().filter(|xs| xs.elem_count() > 0) {
                        let copy = xs.detach().force_contiguous()?;
                        transfers.push(self.transfer(Motion::Send(*dst), &copy, &copy)?);
                    }
                }
                Message::Recv { shape, dtype, src } if shape.elem_count() > 0 => {
                    let ys = unwritten(shape, *dtype, &self.device)?;
                    transfers.push(self.transfer(Motion::Recv(*src), &ys, &ys)?);
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
        let pending = self.launch(&transfers, request)?;
        Ok(pending.map(move |_| Ok(received)))
    }

    fn start_barrier(&self, request: &mut Request<'_>) -> Result<Pending<Vec<Tensor>>> {
        let flag = Tensor::zeros(1, DType::U8, &self.device)?;
        let transfer = self.transfer(Motion::AllReduce(ReduceOp::Sum), &flag, &flag)?;
        self.launch(&[transfer], request)
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

    fn sums_in_rank_order(&self) -> bool {
        false
    }

    fn bytes_per_reduced_value(&self, op: ReduceOp, dtype: DType) -> usize {
        Reduction::new(op, dtype, self.half_sums).bytes_per_value(dtype)
    }

    fn start(&self, request: &mut Request<'_>) -> Result<Pending<Vec<Tensor>>> {
        let run = &self.session.run;
        for xs in request.tensors {
            element::check(xs, run.rank, &self.device)?;
        }
        run.compute.context().bind_to_thread().w()?;
        match request.operation {
            Operation::Messages { messages, .. } => self.start_messages(messages, request),
            Operation::Barrier => self.start_barrier(request),
            _ => self.start_collective(request),
        }
    }

    fn subgroup(&self, ranks: &[usize], _: &[i64]) -> Result<Box<dyn Communicator>> {
        let (Some(rank), Some(color)) = (
            ranks.iter().position(|rank| *rank == self.group.rank),
            ranks.iter().min(),
        ) else {
            candle_core::bail!("split: this rank is not in its own group {ranks:?}");
        };
        let members = ranks.iter().map(|rank| self.group.members[*rank]).collect();
        let run = &self.session.run;
        let stream = new_stream(run)?;
        let split = self.group.split(*color, (members, rank), stream, run);
        match split.and_then(|group| group.map(|group| run.add(group)).transpose()) {
            Ok(Some(group)) => Ok(Box::new(Self {
                session: self.session.clone(),
                group,
                device: self.device.clone(),
                half_sums: self.half_sums,
            })),
            Ok(None) => Ok(Box::new(Unconnected {
                rank: 0,
                world_size: 1,
                device: self.device.clone(),
            })),
            Err(error) => {
                run.fail(error.clone());
                Err(error.into())
            }
        }
    }

    fn check(&self) -> Result<()> {
        Ok(self.session.run.check(&format_args!("what was read"))?)
    }
}
