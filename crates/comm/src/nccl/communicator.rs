//! One rank's end of a group over NCCL.

use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::{DType, Device, Result, Tensor};

use super::group::{Group, wait_settled};
use super::in_flight::{Finish, Held, InFlight};
use super::joining::new_stream;
use super::reduction::Reduction;
use super::session::Session;
use super::transfer::{Transfer, enqueue, unwritten};
use crate::call::{Call, Operation, describe};
use crate::communicator::own_slice;
use crate::device::empty;
use crate::element;
use crate::single::Single;
use crate::{Communicator, Error, HalfSums, P2p, Pending, ReduceOp, call_site};

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
    #[track_caller]
    fn call(&self, operation: Operation, xs: Option<&Tensor>) -> Call {
        Call {
            operation,
            tensor: xs.map(|xs| (xs.shape().clone(), xs.dtype())),
            site: call_site::current(),
        }
    }

    fn check_tensor(&self, xs: &Tensor) -> Result<()> {
        element::check(xs, self.session.state.rank, &self.device)
    }

    /// Starts transfers, all under way together; `finish` makes the result of what they have written.
    fn start<T: Send + 'static>(
        &self,
        call: &Call,
        transfers: &[Transfer],
        (finish, waits_on_host): (Finish<T>, bool),
    ) -> Result<Pending<T>> {
        let (session, group) = (&self.session, &self.group);
        session.state.check(call)?;
        session.compute.context().bind_to_thread().w()?;
        let tensors = transfers.iter().flat_map(Transfer::tensors).collect();
        let motions = transfers
            .iter()
            .map(|transfer| transfer.motion(&session.compute));
        let motions = motions.collect::<Result<Vec<_>>>()?;
        let held = Held::new(tensors, &session.compute, &group.stream)?;
        let (seq, launched) = {
            let mut state = group.lock();
            let handle = state.handle()?;
            let seq = state.next_seq;
            state.next_seq += 1;
            // SAFETY: the motions are of tensors that `held` keeps, and the group's stream waits for what makes them.
            #[allow(unsafe_code)]
            let launched = unsafe { enqueue(&motions, handle, &group.stream) };
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
        let in_flight = InFlight::new((session, group), call, held, (finish, waits_on_host))?;
        Ok(Pending::from_work(Box::new(in_flight)))
    }

    /// Starts a transfer that gives `ys`.
    fn start_one(&self, call: &Call, transfer: Transfer, ys: Tensor) -> Result<Pending<Tensor>> {
        self.start(call, &[transfer], (Box::new(move || Ok(ys)), false))
    }

    /// Starts a reduction whose result has these dims, and goes to `place` if that is given. NCCL writes it there; reductions
    /// that it does not make by itself are copied.
    fn start_reduction(
        &self,
        operation: Operation,
        (xs, op): (&Tensor, ReduceOp),
        (dims, place): (&[usize], Option<Tensor>),
        transfer: impl Fn(Tensor, Tensor) -> Transfer,
    ) -> Result<Pending<Tensor>> {
        self.check_tensor(xs)?;
        element::check_reduces(&operation, xs.dtype(), &self.device)?;
        let call = self.call(operation, Some(xs));
        if xs.elem_count() == 0 {
            return self.nothing(dims, xs.dtype());
        }
        let reduction = Reduction::new(op, xs.dtype(), self.half_sums);
        if let (Reduction::Plain, Some(place)) = (&reduction, &place) {
            return self.start_one(&call, transfer(xs.clone(), place.clone()), place.clone());
        }
        let mut transfers = Vec::new();
        let mut outputs = Vec::new();
        for xs in reduction.inputs(xs)? {
            let ys = unwritten(dims, xs.dtype(), &self.device)?;
            outputs.push(ys.clone());
            transfers.push(transfer(xs, ys));
        }
        let finish = move || {
            let result = reduction.finish(&outputs)?;
            let Some(place) = place else {
                return Ok(result);
            };
            place
                .flatten_all()?
                .slice_set(&result.flatten_all()?, 0, 0)?;
            Ok(place)
        };
        self.start(&call, &transfers, (Box::new(finish), false))
    }

    /// The result of an operation on tensors without elements, which moves nothing.
    fn nothing(&self, dims: &[usize], dtype: DType) -> Result<Pending<Tensor>> {
        Ok(Pending::ready(empty(dims, dtype, &self.device)?))
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
    fn all_reduce(&self, xs: &Tensor, op: ReduceOp) -> Result<Pending<Tensor>> {
        let transfer = |xs, ys| Transfer::AllReduce(op, xs, ys);
        self.start_reduction(
            Operation::AllReduce(op),
            (xs, op),
            (xs.dims(), None),
            transfer,
        )
    }

    #[track_caller]
    fn all_gather(&self, xs: &Tensor) -> Result<Pending<Tensor>> {
        self.check_tensor(xs)?;
        let mut dims = xs.dims().to_vec();
        dims[0] *= self.world_size();
        if xs.elem_count() == 0 {
            return self.nothing(&dims, xs.dtype());
        }
        let ys = unwritten(dims, xs.dtype(), &self.device)?;
        let call = self.call(Operation::AllGather, Some(xs));
        self.start_one(&call, Transfer::AllGather(xs.clone(), ys.clone()), ys)
    }

    #[track_caller]
    fn reduce_scatter(&self, xs: &Tensor, op: ReduceOp) -> Result<Pending<Tensor>> {
        let mut dims = xs.dims().to_vec();
        dims[0] /= self.world_size();
        let transfer = |xs, ys| Transfer::ReduceScatter(op, xs, ys);
        self.start_reduction(
            Operation::ReduceScatter(op),
            (xs, op),
            (&dims, None),
            transfer,
        )
    }

    #[track_caller]
    fn all_reduce_in_place(&self, xs: &Tensor, op: ReduceOp) -> Result<Pending<Tensor>> {
        let transfer = |xs, ys| Transfer::AllReduce(op, xs, ys);
        let place = (xs.dims(), Some(xs.clone()));
        self.start_reduction(Operation::AllReduce(op), (xs, op), place, transfer)
    }

    #[track_caller]
    fn reduce_scatter_in_place(&self, xs: &Tensor, op: ReduceOp) -> Result<Pending<Tensor>> {
        let slice = own_slice(self, xs)?;
        let transfer = |xs, ys| Transfer::ReduceScatter(op, xs, ys);
        let (dims, place) = (slice.dims().to_vec(), Some(slice));
        self.start_reduction(
            Operation::ReduceScatter(op),
            (xs, op),
            (&dims, place),
            transfer,
        )
    }

    /// NCCL does it where the input is this rank's slice of the result.
    #[track_caller]
    fn all_gather_in_place(&self, xs: &Tensor) -> Result<Pending<Tensor>> {
        self.check_tensor(xs)?;
        let slice = own_slice(self, xs)?;
        let call = self.call(Operation::AllGather, Some(&slice));
        let transfer = Transfer::AllGather(slice, xs.clone());
        self.start_one(&call, transfer, xs.clone())
    }

    #[track_caller]
    fn broadcast(&self, xs: &Tensor, root: usize) -> Result<Pending<Tensor>> {
        self.check_tensor(xs)?;
        if xs.elem_count() == 0 {
            return self.nothing(xs.dims(), xs.dtype());
        }
        let ys = unwritten(xs.dims(), xs.dtype(), &self.device)?;
        let call = self.call(Operation::Broadcast { root }, Some(xs));
        self.start_one(&call, Transfer::Broadcast(root, xs.clone(), ys.clone()), ys)
    }

    #[track_caller]
    fn all_to_all(&self, xs: &Tensor) -> Result<Pending<Tensor>> {
        self.check_tensor(xs)?;
        if xs.elem_count() == 0 {
            return self.nothing(xs.dims(), xs.dtype());
        }
        let ys = unwritten(xs.dims(), xs.dtype(), &self.device)?;
        let len = xs.dim(0)? / self.world_size();
        let mut transfers = Vec::new();
        for peer in 0..self.world_size() {
            transfers.push(Transfer::Send(peer, xs.narrow(0, peer * len, len)?));
            transfers.push(Transfer::Recv(peer, ys.narrow(0, peer * len, len)?));
        }
        let call = self.call(Operation::AllToAll, Some(xs));
        self.start(&call, &transfers, (Box::new(move || Ok(ys)), false))
    }

    #[track_caller]
    fn batch_send_recv(&self, ops: &[P2p<'_>]) -> Result<Pending<Vec<Tensor>>> {
        let operation = Operation::Batch(describe(ops, &self.group.members).into());
        let call = self.call(operation, None);
        let (mut transfers, mut received) = (Vec::new(), Vec::new());
        for op in ops {
            match op {
                P2p::Send { xs, dst } => {
                    self.check_tensor(xs)?;
                    if xs.elem_count() > 0 {
                        transfers.push(Transfer::Send(*dst, xs.detach().force_contiguous()?));
                    }
                }
                P2p::Recv { shape, dtype, src } if shape.elem_count() > 0 => {
                    let ys = unwritten(shape, *dtype, &self.device)?;
                    transfers.push(Transfer::Recv(*src, ys.clone()));
                    received.push(ys);
                }
                P2p::Recv { shape, dtype, .. } => {
                    received.push(empty(shape.clone(), *dtype, &self.device)?);
                }
            }
        }
        if transfers.is_empty() {
            return Ok(Pending::ready(received));
        }
        self.start(&call, &transfers, (Box::new(move || Ok(received)), false))
    }

    #[track_caller]
    fn barrier(&self) -> Result<Pending<()>> {
        let call = self.call(Operation::Barrier, None);
        let flag = Tensor::zeros(1, DType::U8, &self.device)?;
        let transfer = Transfer::AllReduce(ReduceOp::Sum, flag.clone(), flag);
        self.start(&call, &[transfer], (Box::new(|| Ok(())), true))
    }

    #[track_caller]
    fn split(&self, color: usize, key: usize) -> Result<Box<dyn Communicator>> {
        let (number, ranks) = self.split_members(color, key)?;
        let Some(rank) = ranks.iter().position(|rank| *rank == self.group.rank) else {
            candle_core::bail!("split: this rank is not in its own group {ranks:?}");
        };
        let members = ranks.iter().map(|rank| self.group.members[*rank]).collect();
        let stream = new_stream(&self.session)?;
        let split = self
            .group
            .split(number, (members, rank), stream, &self.session.state);
        match split {
            Ok(Some(group)) => Ok(Box::new(Self {
                session: self.session.clone(),
                group: self.session.add(group),
                device: self.device.clone(),
                half_sums: self.half_sums,
            })),
            Ok(None) => Ok(Box::new(Single::new(self.device.clone()))),
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
