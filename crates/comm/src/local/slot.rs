//! One collective operation of a group, from the first rank's arrival to the last one's departure.

use std::sync::Arc;
use std::time::Instant;

use candle_core::Tensor;

use super::copy::copy;
use crate::Error;
use crate::error::group_name;
use crate::memory::adopted::GivenAway;
use crate::operation::call::Call;

/// The state of an operation that is waited for.
pub(super) enum Polled<T> {
    Ready(T),
    /// Not complete; these world ranks have not arrived.
    Missing(Vec<usize>),
}

/// What a rank brings to an operation.
pub(super) struct Deposit {
    pub call: Call,
    pub input: Tensor,
    /// Where the output goes, unless it is new.
    pub place: Option<Tensor>,
    /// The input, if it is a copy: its rank has given up the output.
    pub copied: Option<GivenAway>,
}

/// The outputs of an operation, by group rank; `None` for one that is in its place.
pub(super) type Outputs = Vec<Option<GivenAway>>;

enum SlotPhase {
    /// By group rank; some have not arrived.
    Gathering(Vec<Option<Deposit>>),
    /// All have arrived; somebody is computing the outputs.
    Working,
    Done(Outputs),
    Failed(Error),
}

/// One collective operation of a group.
pub(super) struct Slot {
    /// World ranks, by group rank.
    members: Arc<[usize]>,
    phase: SlotPhase,
    /// Ranks that want nothing more from this slot.
    released: Vec<bool>,
    /// When the outputs came.
    pub finished: Option<Instant>,
}

impl Slot {
    pub fn new(members: Arc<[usize]>) -> Self {
        Self {
            phase: SlotPhase::Gathering(members.iter().map(|_| None).collect()),
            released: vec![false; members.len()],
            finished: None,
            members,
        }
    }

    /// Adds a rank's deposit. Two calls that differ fail the slot at once. The last rank to
    /// arrive gets all deposits, in rank order, and must call [`finish`](Self::finish).
    pub fn arrive(&mut self, rank: usize, deposit: Deposit) -> Option<Vec<Deposit>> {
        let SlotPhase::Gathering(deposits) = &mut self.phase else {
            return None;
        };
        let mut others = self.members.iter().zip(&*deposits);
        let differing = others.find_map(|(member, other)| {
            let other = &other.as_ref()?.call;
            (!other.agrees(&deposit.call)).then(|| (*member, other.to_string()))
        });
        if let Some(other) = differing {
            let mut pair = [other, (self.members[rank], deposit.call.to_string())];
            pair.sort();
            let [first, second] = pair;
            self.phase = SlotPhase::Failed(Error::Mismatch {
                group: group_name(&self.members),
                seq: deposit.call.seq.unwrap_or_default(),
                first,
                second,
            });
            return None;
        }
        deposits[rank] = Some(deposit);
        if deposits.iter().any(Option::is_none) {
            return None;
        }
        let all = std::mem::take(deposits).into_iter().flatten().collect();
        self.phase = SlotPhase::Working;
        Some(all)
    }

    /// World ranks that have not arrived.
    pub fn missing(&self) -> Vec<usize> {
        let SlotPhase::Gathering(deposits) = &self.phase else {
            return Vec::new();
        };
        let missing = self.members.iter().zip(deposits);
        let missing = missing.filter(|(_, deposit)| deposit.is_none());
        missing.map(|(member, _)| *member).collect()
    }

    /// Whether two ranks called different operations, or the work failed.
    pub fn has_failed(&self) -> bool {
        matches!(self.phase, SlotPhase::Failed(_))
    }

    /// Sets the outputs, or the error that all ranks get.
    pub fn finish(&mut self, outputs: Result<Outputs, Error>) {
        self.finished = Some(Instant::now());
        self.phase = match outputs {
            Ok(mut outputs) => {
                let unwanted = outputs.iter_mut().zip(&self.released);
                let unwanted = unwanted.filter(|(_, released)| **released);
                unwanted.for_each(|(output, _)| *output = None);
                SlotPhase::Done(outputs)
            }
            Err(error) => SlotPhase::Failed(error),
        };
    }

    /// Takes a rank's output, if the operation is over: `None` if it is in its place.
    pub fn take(&mut self, rank: usize) -> Result<Polled<Option<GivenAway>>, Error> {
        let found = match &mut self.phase {
            SlotPhase::Gathering(_) => return Ok(Polled::Missing(self.missing())),
            SlotPhase::Working => return Ok(Polled::Missing(Vec::new())),
            SlotPhase::Done(outputs) => Ok(Polled::Ready(outputs[rank].take())),
            SlotPhase::Failed(error) => Err(error.clone()),
        };
        self.released[rank] = true;
        found
    }

    /// Gives up a rank's output, which it gets if it is there, as soon as nobody reads its input any more. While other ranks are
    /// missing a copy replaces the input; without memory for that it is still to be read.
    pub fn give_up(&mut self, rank: usize) -> Result<Polled<Option<GivenAway>>, Error> {
        if let SlotPhase::Gathering(deposits) = &mut self.phase
            && let Some(deposit) = &mut deposits[rank]
            && let Ok(copy) = copy(&deposit.input, deposit.input.device())
        {
            deposit.input = copy.clone();
            deposit.copied = Some(GivenAway::new(copy));
            deposit.place = None;
            self.released[rank] = true;
            return Ok(Polled::Ready(None));
        }
        match self.take(rank) {
            // The others say it.
            Err(_) => Ok(Polled::Ready(None)),
            found => found,
        }
    }

    /// Whether nobody wants anything more from this slot.
    pub fn is_over(&self) -> bool {
        self.released.iter().all(|released| *released)
            && matches!(self.phase, SlotPhase::Done(_) | SlotPhase::Failed(_))
    }
}
