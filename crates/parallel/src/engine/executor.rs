//! The one place where actions are carried out.

use candle_core::{Error, Result};

use super::units::Units;
use crate::gradients::{Gradients, ReducedGradients, UpdateNotice};
use crate::offload::Column;
use crate::optimizer::DistributedOptimizer;
use crate::params::{Parameters, ShardedWeights};
use crate::pass::ComputeTimer;
use crate::program::{Action, Item, Program};
use crate::schedule::Instruction;

/// Carries out the actions of a rank, and has what they work on: as much of it as the list needs.
pub(super) struct Executor<'a> {
    pub params: &'a Parameters,
    pub units: Option<Units<'a>>,
    pub gradients: Option<&'a mut Gradients>,
    pub notice: Option<&'a UpdateNotice>,
    /// The result of [`Action::Norm`].
    pub reduced: Option<ReducedGradients>,
    pub update: Option<Update<'a>>,
}

/// An update of the weights.
#[derive(Clone, Copy)]
pub(super) struct Update<'a> {
    pub optimizer: &'a DistributedOptimizer,
    pub gradients: &'a ReducedGradients,
    /// The number of the update, from 1.
    pub number: usize,
    pub lr: f64,
}

impl<'a> Executor<'a> {
    pub fn new(params: &'a Parameters) -> Self {
        Self {
            params,
            units: None,
            gradients: None,
            notice: None,
            reduced: None,
            update: None,
        }
    }

    /// Carries out a list.
    ///
    /// # Errors
    /// The first one of its actions.
    pub fn run(&mut self, program: &Program) -> Result<()> {
        for (instruction, actions) in program.phases() {
            let Some(instruction) = instruction else {
                self.act_all(actions)?;
                continue;
            };
            if !self.units()?.trains() {
                self.instruction(instruction, actions)?;
                continue;
            }
            let pp = &self.units()?.pipeline.pp;
            pp.set_phase(|| instruction.to_string());
            let done = self.instruction(instruction, actions);
            done.map_err(|err| err.context(format!("{instruction}")))?;
        }
        Ok(())
    }

    fn instruction(&mut self, instruction: Instruction, actions: &[Action]) -> Result<()> {
        let units = self.units()?;
        units.begin(instruction)?;
        match units.timed(instruction) {
            None => self.act_all(actions)?,
            Some((place, span)) => {
                let (pipeline, timer) = (units.pipeline, ComputeTimer::start());
                pipeline.timed(place, span, || self.act_all(actions))?;
                self.units()?.add_secs(place, timer.secs());
            }
        }
        self.units()?.end(instruction)
    }

    fn act_all(&mut self, actions: &[Action]) -> Result<()> {
        let trains = self.units.as_ref().is_some_and(Units::trains);
        let mut has_passed = false;
        for (place, &action) in actions.iter().enumerate() {
            self.act(action)?;
            has_passed |= trains && action.is_pass();
            let next = actions.get(place + 1);
            // All that a block has computed with is gone.
            if has_passed && next.is_none_or(|next| !next.ends_block()) {
                has_passed = false;
                let device = self.params.groups().shard.device();
                self.params.meter().count_activations(device)?;
            }
            self.params.meter().note(action);
        }
        Ok(())
    }

    fn act(&mut self, action: Action) -> Result<()> {
        match action {
            Action::Forward(_)
            | Action::Infer(_)
            | Action::Backward(_)
            | Action::InputGrad(_)
            | Action::WeightGrad(_) => {
                let units = self.units.as_mut().ok_or_else(misplaced)?;
                units.pass_of_block(action, self.gradients.as_deref_mut())
            }

            Action::AwaitBlock(block) => self.params.pending().wait_for_block(block as usize),
            Action::AwaitAllBut(num) => self.params.pending().wait_for_all_but(num as usize),
            Action::Gather(bucket) | Action::GatherCopy(bucket) => {
                let from_copy = action == Action::GatherCopy(bucket);
                let gathering = self.sharded()?.gather(bucket as usize, from_copy);
                gathering.map_err(|err| self.about_weights(err, bucket))
            }
            Action::Arrive(bucket) | Action::ArriveAndCopy(bucket) => {
                let keeps_copy = action == Action::ArriveAndCopy(bucket);
                let arrived = self.sharded()?.arrive(bucket as usize, keeps_copy);
                arrived.map_err(|err| self.about_weights(err, bucket))
            }
            Action::Free(bucket) => self.sharded()?.free(bucket as usize),
            Action::FreeAll => self.sharded()?.free_all(),

            Action::MakeGradients(bucket) => self.gradients()?.make_whole(bucket as usize),
            Action::Reduce(bucket) => self.gradients()?.start_sum(bucket as usize),
            Action::AddReduced(bucket) => self.gradients()?.add_reduced(bucket as usize),
            Action::Square(bucket) => self.gradients()?.square(bucket as usize),
            Action::Settle(bucket) => self.gradients()?.settle(bucket as usize),
            Action::Norm => {
                let notice = self.notice;
                self.reduced = Some(self.gradients()?.norm(notice)?);
                Ok(())
            }

            Action::Fetch(Item::Sum(bucket)) if self.update.is_none() => {
                self.gradients()?.fetch_sum(bucket as usize)
            }
            Action::Fetch(item) => self.column(item)?.fetch(item.place()[1]),
            Action::Put(item) => self.column(item)?.put(item.place()[1]),
            Action::Drop(item) => self.column(item)?.free(item.place()[1]),
            Action::FlushSums => self.gradients()?.column().flush(),
            Action::FlushUpdates => {
                if let Some(sharded) = self.params.sharded() {
                    sharded.slices.flush()?;
                }
                self.update()?.optimizer.store.column.flush()
            }

            Action::Update(part) => {
                let update = self.update()?;
                let (optimizer, gradients) = (update.optimizer, update.gradients);
                optimizer.update_part(part as usize, gradients, update.number, update.lr)
            }
            Action::Spread(bucket) => {
                let update = self.update()?;
                let optimizer = update.optimizer;
                optimizer.spread_weights(bucket as usize, update.gradients)
            }
        }
    }

    fn about_weights(&self, err: Error, bucket: u32) -> Error {
        let block = self.params.layout().bucket(bucket as usize).block;
        err.context(format!("gathering the weights of block {block}"))
    }

    /// Where an item is kept.
    fn column(&self, item: Item) -> Result<&Column> {
        let column = match (item, &self.update) {
            (Item::Weights(_), _) => Some(&self.sharded()?.slices),
            (Item::Sum(_), None) => self.gradients.as_ref().map(|gradients| gradients.column()),
            (Item::Sum(_), Some(update)) => update.gradients.away(),
            (Item::State(_), update) => update.map(|update| &update.optimizer.store.column),
        };
        column.ok_or_else(misplaced)
    }

    fn units(&mut self) -> Result<&mut Units<'a>> {
        self.units.as_mut().ok_or_else(misplaced)
    }

    fn gradients(&mut self) -> Result<&mut Gradients> {
        self.gradients.as_deref_mut().ok_or_else(misplaced)
    }

    fn sharded(&self) -> Result<&'a ShardedWeights> {
        self.params.sharded().ok_or_else(misplaced)
    }

    fn update(&self) -> Result<Update<'a>> {
        self.update.ok_or_else(misplaced)
    }
}

fn misplaced() -> Error {
    Error::msg("a list of actions has one that works on what the list has nothing to do with")
}
