//! A step as a list of [`Action`]s. What a rank does follows from the model, the plan of passes and the settings alone, so it is worked out before
//! anything runs, without a device and without other ranks.

mod action;
mod check;
mod lower;
#[cfg(test)]
#[path = "../../tests/unit/mutants.rs"]
mod mutants;
mod simulate;

pub(crate) use action::{Action, Item};
pub(crate) use lower::{Lowering, Passes, Setup, SumPlaces};

pub(crate) use simulate::{TimedRank, simulate};

use std::hash::{Hash, Hasher};

use twox_hash::XxHash64;

use crate::schedule::Instruction;

/// A list of the actions of a rank: the passes of a step, or what comes after them.
#[derive(Clone, Default)]
pub(crate) struct Program {
    actions: Vec<Action>,
    /// Instructions, and where the actions of each end.
    phases: Vec<(Option<Instruction>, usize)>,
    /// A hash of what the ranks of a group do together, in its order.
    collectives: u64,
}

impl Program {
    /// Ends the actions of an instruction, or of what is between instructions.
    fn end_phase(&mut self, instruction: Option<Instruction>) {
        self.phases.push((instruction, self.actions.len()));
    }

    fn push(&mut self, action: Action) {
        if action.is_collective() {
            let mut hasher = XxHash64::with_seed(self.collectives);
            action.hash(&mut hasher);
            self.collectives = hasher.finish();
        }
        self.actions.push(action);
    }

    /// A list of nothing but passes.
    pub fn of_passes(list: &[Instruction]) -> Self {
        let phases = list.iter().map(|instruction| (Some(*instruction), 0));
        Self {
            phases: phases.collect(),
            ..Self::default()
        }
    }

    /// A hash of the collectives in their order, which all ranks of a group must have alike.
    pub fn condensed(&self) -> u64 {
        self.collectives
    }

    /// The phase at `index`.
    fn phase(&self, index: usize) -> Option<(Option<Instruction>, &[Action])> {
        let (instruction, end) = self.phases.get(index)?;
        let start = index
            .checked_sub(1)
            .map_or(0, |before| self.phases[before].1);
        Some((*instruction, &self.actions[start..*end]))
    }

    /// Instructions with their actions, in order; `None`: what is before the first one or after the last one.
    pub fn phases(&self) -> impl Iterator<Item = (Option<Instruction>, &[Action])> {
        (0..self.phases.len()).filter_map(|index| self.phase(index))
    }
}
