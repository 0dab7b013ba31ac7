//! Starting collectives, doing their work, and waiting for them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

#[cfg(feature = "cuda")]
use candle_core::Device;
use candle_core::{Result, Tensor};

#[cfg(feature = "cuda")]
use super::cuda;
use super::slot::{Deposit, Outputs, Polled, Slot};
use super::{LocalCommunicator, host};
use crate::memory::adopted::{Adopted, GivenAway};
use crate::operation::call::Call;
use crate::operation::pending::Work;
use crate::reduction::element::with_element;
use crate::reduction::plan::Plan;
use crate::{Communicator, Error, Pending, Request};

/// From this input size on, in bytes, work on the CPU goes to a background job: about where handing it over costs less than
/// doing it while everybody waits.
const BACKGROUND_BYTES: usize = 256 << 10;

/// A started collective, of which a rank is to get its output.
struct StartedCollective {
    comm: LocalCommunicator,
    seq: u64,
    call: Call,
    place: Option<Tensor>,
    /// A result that is not in the place.
    _expected: Option<Adopted>,
    /// What this rank gave, so that it is freed where it was allocated, whoever is the last to read it.
    _input: Tensor,
}

impl LocalCommunicator {
    /// Deposits this rank's part of a collective. The last rank to arrive does the work.
    pub(super) fn start_collective(&self, request: &Request<'_>) -> Result<Pending<Vec<Tensor>>> {
        let xs = request.operation.only_tensor(request.tensors)?;
        let (call, seq) = (request.call.clone(), request.call.seq.unwrap_or_default());
        let place = request.place.map(Tensor::detach);
        let deposit = Deposit {
            call: call.clone(),
            input: xs.detach(),
            place: place.clone(),
            copied: None,
        };
        let mut state = self.world.lock();
        state.begin(self.world_rank(), request)?;
        let slot = state.slots.entry((self.group, seq));
        let slot = slot.or_insert_with(|| Slot::new(self.members.clone()));
        let deposits = slot.arrive(self.rank, deposit);
        let has_failed = slot.has_failed();
        drop(state);
        match deposits {
            Some(deposits) => self.work(seq, deposits)?,
            None if has_failed => self.world.notify(&self.members),
            None => {}
        }
        let dims = call.output_dims(self.rank);
        let expected = || Adopted::expected(dims.iter().product(), xs.dtype(), xs.device());
        Ok(Pending::from_work(StartedCollective {
            comm: self.clone(),
            seq,
            call,
            _expected: place.is_none().then(expected),
            place,
            _input: xs.clone(),
        }))
    }

    /// Computes the outputs of all ranks, here or in the background. On GPUs that is to enqueue it, which is done here.
    fn work(&self, seq: u64, deposits: Vec<Deposit>) -> Result<()> {
        let num_bytes = |xs: &Tensor| xs.elem_count() * xs.dtype().size_in_bytes();
        let mut inputs = deposits.iter().map(|deposit| &deposit.input);
        let in_background =
            self.device().is_cpu() && inputs.any(|xs| num_bytes(xs) >= BACKGROUND_BYTES);
        let comm = self.clone();
        let job = move || {
            // A panic must reach the waiting ranks as an error: in a background job it would abort the process.
            let outputs = catch_unwind(AssertUnwindSafe(|| run(&deposits, &comm, in_background)));
            let outputs = match outputs {
                Ok(outputs) => outputs.map_err(|error| error.to_string()),
                Err(_) => Err("the work panicked".to_string()),
            };
            let operation = &deposits[0].call.operation;
            let outputs = outputs.map_err(|why| Error::Argument(format!("{operation}: {why}")));
            // A rank that wakes up owns its tensors alone: it frees them where it counts them.
            drop(deposits);
            let mut state = comm.world.lock();
            state.look_at((comm.group, seq), |slot| slot.finish(outputs));
            drop(state);
            comm.world.notify(&comm.members);
        };
        if in_background {
            self.world.spawn(job);
            return Ok(());
        }
        job();
        self.world.make_current(self.world_rank())
    }
}

impl StartedCollective {
    /// Waits until `look` finds the output, or that there is none, at the slot of this operation.
    fn wait_until(
        &self,
        look: impl Fn(&mut Slot, usize) -> std::result::Result<Polled<Option<GivenAway>>, Error>,
    ) -> std::result::Result<Option<Tensor>, Error> {
        let LocalCommunicator {
            world, group, rank, ..
        } = &self.comm;
        let id = (*group, self.seq);
        let output = world.wait(self.comm.world_rank(), &self.call, Some(id), |state| {
            let found = state.look_at(id, |slot| look(slot, *rank));
            found.unwrap_or(Ok(Polled::Ready(None)))
        })?;
        Ok(output.map(|output| output.xs))
    }
}

impl Work for StartedCollective {
    fn completed(&self) -> Option<Instant> {
        let state = self.comm.world.lock();
        state.slots.get(&(self.comm.group, self.seq))?.finished
    }

    fn wait(self: Box<Self>) -> Result<Vec<Tensor>> {
        let output = self.wait_until(Slot::take)?;
        Ok(Vec::from_iter(output.or(self.place)))
    }

    fn abandon(self: Box<Self>) {
        // An output that is there is freed here, as one that was waited for.
        if let Err(error) = self.wait_until(Slot::give_up) {
            tracing::warn!("an operation whose result was dropped failed: {error}");
        }
    }
}

/// The outputs of a collective, in their places or with storages of their own on the ranks' devices. On GPUs they are only enqueued
/// on return. With `parallel` on all cores.
fn run(deposits: &[Deposit], group: &LocalCommunicator, parallel: bool) -> Result<Outputs> {
    let Deposit { call, input, .. } = &deposits[0];
    let plan = Plan::new(&call.operation, &call.kinds[0].1, deposits.len(), None);
    match group.device() {
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => cuda::run(plan, deposits, group),
        _ => with_element!(input.dtype(), host::run(plan, deposits, parallel)),
    }
}
