//! Starting collectives, doing their work, and waiting for them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor};

use super::slot::{Deposit, Payload, Released, Slot, Taken};
use super::world::{LastCall, Polled, State, World};
use super::{LocalCommunicator, work};
use crate::adopted::{adopt, give_away};
use crate::call::Call;
use crate::pending::Work;
use crate::{Error, Operation, Pending, element};

/// From this input size on, in bytes, work on the CPU goes to a background job: about where handing it over costs less than
/// doing it while everybody waits.
const BACKGROUND_BYTES: usize = 256 << 10;

/// A started collective, of which a rank is to get its output.
struct InFlight {
    world: Arc<World>,
    group: usize,
    seq: u64,
    rank: usize,
    world_rank: usize,
    call: Call,
    /// Number and type of the values of a result that is not in a place of the caller's.
    adopted: Option<(usize, DType)>,
    /// What this rank gave, so that it is freed where it was allocated, whoever is the last to read it.
    _input: Tensor,
}

impl LocalCommunicator {
    /// Deposits this rank's part of a collective. The last rank to arrive does the work.
    pub(super) fn start_collective(
        &self,
        call: Call,
        xs: &Tensor,
        place: Option<&Tensor>,
    ) -> Result<Pending<Vec<Tensor>>> {
        element::check_reduces(&call.operation, xs.dtype(), &self.device)?;
        let world_rank = self.world_rank();
        let mut state = self.world.lock();
        World::check_alive(&state, world_rank, &call)?;
        let State { ranks, groups, .. } = &mut *state;
        let group = &mut groups[self.group];
        let seq = group.next_seq[self.rank];
        group.next_seq[self.rank] += 1;
        ranks[world_rank].last = Some(LastCall {
            group: self.group,
            seq: Some(seq),
            call: call.clone(),
        });
        let slot = group
            .slots
            .entry(seq)
            .or_insert_with(|| Slot::new(self.members.len()));
        let deposit = Deposit {
            call: call.clone(),
            payload: Payload::Tensor(xs.detach(), place.map(Tensor::detach)),
        };
        let deposits = slot.deposit(self.rank, deposit, (&self.members, seq));
        let has_failed = slot.has_failed();
        drop(state);
        match deposits {
            Some(deposits) => self.work(seq, &call.operation, deposits)?,
            None if has_failed => self.world.notify(&self.members),
            None => {}
        }
        let dims = call.operation.output_dims(xs.shape(), self.members.len());
        let adopted = place.is_none().then(|| (dims.iter().product(), xs.dtype()));
        if let Some((len, dtype)) = adopted {
            adopt(len, dtype, &self.device);
        }
        Ok(Pending::from_work(Box::new(InFlight {
            world: self.world.clone(),
            group: self.group,
            seq,
            rank: self.rank,
            world_rank,
            call,
            adopted,
            _input: xs.clone(),
        })))
    }

    /// Computes the outputs of all ranks, here or in the background. On GPUs that is to enqueue it, which is done here.
    fn work(&self, seq: u64, operation: &Operation, deposits: Vec<Deposit>) -> Result<()> {
        let mut copies = Vec::new();
        let tensors = deposits.into_iter();
        let tensors = tensors.map(|deposit| match deposit.payload {
            Payload::Tensor(xs, place) => (xs, place),
            Payload::Copy(copy) => {
                let xs = copy.tensor().clone();
                copies.push(copy);
                (xs, None)
            }
        });
        let (inputs, places): (Vec<Tensor>, Vec<Option<Tensor>>) = tensors.unzip();
        let in_background = self.device.is_cpu()
            && inputs
                .iter()
                .any(|xs| xs.elem_count() * xs.dtype().size_in_bytes() >= BACKGROUND_BYTES);
        let (world, group, operation) = (self.world.clone(), self.group, operation.clone());
        let members = self.members.clone();
        let job = move || {
            // A panic must reach the waiting ranks as an error: in a background job it would abort the process.
            let devices: Vec<&Device> = members.iter().map(|rank| world.device(*rank)).collect();
            let outputs = catch_unwind(AssertUnwindSafe(|| {
                work::run(&operation, &inputs, &places, &devices, in_background)
            }));
            let outputs = match outputs {
                Ok(Ok(outputs)) => Ok(outputs),
                Ok(Err(error)) => Err(Error::Argument(format!("{operation}: {error}"))),
                Err(_) => Err(Error::Argument(format!("{operation}: the work panicked"))),
            };
            // A rank that wakes up owns its tensors alone: it frees them where it counts them.
            drop((inputs, places, copies));
            world.finish(group, seq, outputs);
        };
        if in_background {
            self.world.spawn(job);
            return Ok(());
        }
        job();
        self.world.make_current(self.world_rank())
    }
}

impl World {
    fn finish(&self, group: usize, seq: u64, outputs: std::result::Result<Vec<Tensor>, Error>) {
        let mut state = self.lock();
        let group = &mut state.groups[group];
        let mut unwanted = Vec::new();
        if let Some(slot) = group.slots.get_mut(&seq) {
            unwanted = slot.finish(outputs);
            if slot.is_over() {
                group.slots.remove(&seq);
            }
        }
        let members = group.members.clone();
        drop(state);
        for xs in unwanted {
            adopt(xs.elem_count(), xs.dtype(), xs.device());
        }
        self.notify(&members);
    }
}

impl InFlight {
    fn poll(&self, state: &mut State) -> Polled<Option<Tensor>> {
        let group = &mut state.groups[self.group];
        let Some(slot) = group.slots.get_mut(&self.seq) else {
            return Polled::Failed(Error::Argument(format!(
                "{}: the result has been taken already",
                self.call
            )));
        };
        let taken = slot.take(self.rank);
        if slot.is_over() {
            group.slots.remove(&self.seq);
        }
        match taken {
            Taken::Output(output) => Polled::Ready(output),
            Taken::Failed(error) => Polled::Failed(error),
            Taken::Missing(ranks) => Polled::Missing(world_ranks(&group.members, ranks)),
        }
    }

    fn poll_release(&self, state: &mut State) -> Polled<Option<Tensor>> {
        let group = &mut state.groups[self.group];
        let Some(slot) = group.slots.get_mut(&self.seq) else {
            return Polled::Ready(None);
        };
        let Released::Input(output) = slot.release(self.rank, |xs| work::copy(xs, xs.device()))
        else {
            return Polled::Missing(world_ranks(&group.members, slot.missing()));
        };
        if slot.is_over() {
            group.slots.remove(&self.seq);
        }
        Polled::Ready(output)
    }
}

fn world_ranks(members: &[usize], group_ranks: Vec<usize>) -> Vec<usize> {
    group_ranks.into_iter().map(|rank| members[rank]).collect()
}

impl Work<Vec<Tensor>> for InFlight {
    fn completed(&self) -> Option<Instant> {
        let state = self.world.lock();
        let slot = state.groups[self.group].slots.get(&self.seq);
        slot.and_then(Slot::finished)
    }

    fn wait(self: Box<Self>) -> Result<Vec<Tensor>> {
        let poll = |state: &mut State| self.poll(state);
        match self.world.wait(self.world_rank, &self.call, poll) {
            Ok(output) => Ok(Vec::from_iter(output)),
            Err(error) => {
                self.get_nothing();
                Err(error.into())
            }
        }
    }

    fn abandon(self: Box<Self>) {
        // An output that is there is freed here, as one that was waited for.
        if self.release().is_none() {
            self.get_nothing();
        }
    }
}

impl InFlight {
    /// The output, if it was there.
    fn release(&self) -> Option<Tensor> {
        let released = self.world.wait(self.world_rank, &self.call, |state| {
            self.poll_release(state)
        });
        released.unwrap_or_else(|error| {
            tracing::warn!("an operation whose result was dropped failed: {error}");
            None
        })
    }

    /// The result that was counted will not come.
    fn get_nothing(&self) {
        if let Some((len, dtype)) = self.adopted {
            give_away(len, dtype, self.world.device(self.world_rank));
        }
    }
}
