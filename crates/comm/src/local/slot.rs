//! One collective operation of a group, from the first rank's arrival to the last one's departure.

use std::time::Instant;

use candle_core::{Result, Tensor};

use crate::Error;
use crate::adopted::GivenAway;
use crate::call::Call;
use crate::error::group_name;

/// What a rank brings to an operation.
#[derive(Debug)]
pub(super) enum Payload {
    /// The input, and where the output goes unless it is new.
    Tensor(Tensor, Option<Tensor>),
    /// A copy of the input of a rank that has given up its output.
    Copy(GivenAway),
}

#[derive(Debug)]
pub(super) struct Deposit {
    pub call: Call,
    pub payload: Payload,
}

enum Phase {
    /// Some ranks have not arrived.
    Gathering,
    /// All have arrived; somebody is computing the outputs.
    Working,
    Done,
    Failed(Error),
}

/// What [`Slot::take`] found.
pub(super) enum Taken {
    Output(Option<Tensor>),
    Failed(Error),
    /// Not complete; these group ranks have not arrived (none: the work is being done).
    Missing(Vec<usize>),
}

/// What became of an input in [`Slot::release`].
pub(super) enum Released {
    /// It is being read.
    NotYet,
    /// Nobody reads it any more. With the output, if it was there.
    Input(Option<Tensor>),
}

/// One collective operation of a group.
pub(super) struct Slot {
    phase: Phase,
    arrived: Vec<bool>,
    deposits: Vec<Option<Deposit>>,
    outputs: Vec<Option<Tensor>>,
    /// Ranks that want nothing more from this slot.
    released: Vec<bool>,
    /// When the outputs came.
    finished: Option<Instant>,
}

impl Slot {
    pub fn new(world_size: usize) -> Self {
        Self {
            phase: Phase::Gathering,
            arrived: vec![false; world_size],
            deposits: (0..world_size).map(|_| None).collect(),
            outputs: (0..world_size).map(|_| None).collect(),
            released: vec![false; world_size],
            finished: None,
        }
    }

    /// Adds a rank's deposit to operation `seq` of the group of these world ranks. Two calls that differ fail the slot at once. The last rank to arrive gets all deposits,
    /// in rank order, and must call [`finish`](Self::finish).
    pub fn deposit(
        &mut self,
        rank: usize,
        deposit: Deposit,
        (members, seq): (&[usize], u64),
    ) -> Option<Vec<Deposit>> {
        self.arrived[rank] = true;
        let other = self
            .deposits
            .iter()
            .enumerate()
            .find_map(|(r, other)| other.as_ref().map(|other| (r, &other.call)));
        if let Some((other_rank, other)) = other
            && matches!(self.phase, Phase::Gathering)
            && !other.agrees(&deposit.call)
        {
            let mut pair = [(members[other_rank], other), (members[rank], &deposit.call)];
            pair.sort_by_key(|(rank, _)| *rank);
            let [first, second] = pair.map(|(rank, call)| (rank, call.to_string()));
            self.phase = Phase::Failed(Error::Mismatch {
                group: group_name(members),
                seq,
                first,
                second,
            });
        }
        self.deposits[rank] = Some(deposit);
        if !matches!(self.phase, Phase::Gathering) || !self.arrived.iter().all(|arrived| *arrived) {
            return None;
        }
        self.phase = Phase::Working;
        Some(self.deposits.iter_mut().filter_map(Option::take).collect())
    }

    /// Whether two ranks called different operations, or the work failed.
    pub fn has_failed(&self) -> bool {
        matches!(self.phase, Phase::Failed(_))
    }

    /// Sets the outputs, one per rank in rank order, or the error that all ranks get. Returns outputs that their ranks have given up.
    pub fn finish(&mut self, outputs: std::result::Result<Vec<Tensor>, Error>) -> Vec<Tensor> {
        self.finished = Some(Instant::now());
        let mut unwanted = Vec::new();
        match outputs {
            Ok(outputs) => {
                for (rank, output) in outputs.into_iter().enumerate() {
                    match self.released[rank] {
                        true => unwanted.push(output),
                        false => self.outputs[rank] = Some(output),
                    }
                }
                self.phase = Phase::Done;
            }
            Err(error) => self.phase = Phase::Failed(error),
        }
        unwanted
    }

    /// When the outputs came, if they have.
    pub fn finished(&self) -> Option<Instant> {
        self.finished
    }

    /// The group ranks that have not arrived.
    pub fn missing(&self) -> Vec<usize> {
        let ranks = 0..self.arrived.len();
        ranks.filter(|rank| !self.arrived[*rank]).collect()
    }

    /// Takes a rank's output, if it is there.
    pub fn take(&mut self, rank: usize) -> Taken {
        match &self.phase {
            Phase::Gathering | Phase::Working => Taken::Missing(self.missing()),
            Phase::Failed(error) => {
                self.released[rank] = true;
                Taken::Failed(error.clone())
            }
            Phase::Done => {
                self.released[rank] = true;
                Taken::Output(self.outputs[rank].take())
            }
        }
    }

    /// Gives up a rank's output, and its place. While other ranks are missing, `copy` replaces the rank's input by one that nobody
    /// else can write to; without memory for a copy the input is still read.
    pub fn release(
        &mut self,
        rank: usize,
        copy: impl FnOnce(&Tensor) -> Result<Tensor>,
    ) -> Released {
        if matches!(self.phase, Phase::Working) {
            return Released::NotYet;
        }
        if matches!(self.phase, Phase::Gathering)
            && let Some(Deposit { payload, .. }) = &mut self.deposits[rank]
            && let Payload::Tensor(xs, _) = payload
        {
            match copy(xs) {
                Ok(copy) => *payload = Payload::Copy(GivenAway::new(copy)),
                Err(_) => return Released::NotYet,
            }
        }
        self.released[rank] = true;
        Released::Input(self.outputs[rank].take())
    }

    /// Whether nobody wants anything more from this slot.
    pub fn is_over(&self) -> bool {
        self.released.iter().all(|released| *released)
            && matches!(self.phase, Phase::Done | Phase::Failed(_))
    }
}
