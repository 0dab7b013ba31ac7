//! Whether a list of actions can be right, found out before anything runs: nothing is used before it is there or after it is freed, each sum
//! begins after its last write, and everything is where it was when the list ends.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{Error, Result, bail};

use super::lower::{Passes, Places, Setup, SumPlaces, Uses, compared_copies};
use super::{Action, Item, Program};
use crate::schedule::Instruction;

/// A rank that goes through lists without values.
pub(super) struct Check<'a> {
    setup: Setup<'a>,
    uses: &'a Uses,
    weights: Vec<Weights>,
    has_copy: Vec<bool>,
    sums: SumPlaces,
    /// Items that are on the device though they are kept away.
    here: BTreeSet<Item>,
    /// Items that were put back, and whose way nobody has waited for.
    put: BTreeSet<Item>,
    /// How often blocks have written to a bucket since it was made, of those that are divided.
    num_writes: Vec<usize>,
    /// Micro-batches whose gradients of weights are still to come, by trained block; empty after the passes.
    owed: BTreeMap<usize, usize>,
    /// Blocks that the instruction is still to pass, in its order.
    expected: Vec<Action>,
    /// Buckets of updated weights on their way.
    on_the_way: u32,
    /// Actions that come once and were done.
    done: BTreeSet<Action>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Weights {
    Absent,
    Gathering,
    Present,
}

/// An error says why an action is wrong.
type Wrong = std::result::Result<(), &'static str>;

fn ensure(is_right: bool, wrong: &'static str) -> Wrong {
    if is_right { Ok(()) } else { Err(wrong) }
}

impl<'a> Check<'a> {
    /// A rank before a list.
    pub fn new(setup: Setup<'a>, uses: &'a Uses, places: Places) -> Self {
        let Places { mut sums, has_copy } = places;
        if !setup.groups.shards_gradients() {
            // They are whole always.
            sums.is_whole.fill(false);
        }
        let started = (0..sums.is_started.len()).filter(|&index| sums.is_started[index]);
        let here = sums.idle.iter().copied().chain(started);
        let here = here.map(|index| Item::Sum(index as u32));
        Self {
            weights: vec![Weights::Absent; setup.spec.num_buckets()],
            has_copy,
            here: here.filter(|_| setup.sums_are_away).collect(),
            put: BTreeSet::new(),
            num_writes: vec![0; sums.is_whole.len()],
            sums,
            owed: BTreeMap::new(),
            expected: Vec::new(),
            on_the_way: 0,
            done: BTreeSet::new(),
            uses,
            setup,
        }
    }

    /// An error unless the list is that of `passes`.
    pub fn passes(&mut self, program: &Program, passes: &Passes<'_>) -> Result<()> {
        let (layout, spec) = (passes.plan.layout(), self.setup.spec);
        let num_frozen = spec.num_frozen(layout);
        let blocks = spec.stages.iter().cloned().flatten();
        let trained = blocks.filter(|block| passes.trains && *block >= num_frozen);
        let num_micro_batches = passes.plan.num_micro_batches();
        self.owed = trained.map(|block| (block, num_micro_batches)).collect();
        self.go(program, Some(passes))?;
        let is_done = self.owed.values().all(|owed| *owed == 0);
        let is_free = self.weights.iter().all(|it| *it == Weights::Absent);
        at_the_end(
            ensure(
                !passes.trains || self.is_freed(),
                "weights may be left of earlier passes",
            )
            .and(ensure(is_done, "a block owes gradients"))
            .and(ensure(is_free, "weights are not freed"))
            .and(self.nothing_is_here(|sums, index| sums.is_started[index])),
        )
    }

    /// An error unless the list sums what passes have left.
    pub fn reduce(&mut self, program: &Program) -> Result<()> {
        self.owed.clear();
        self.go(program, None)?;
        let is_over = self.done.contains(&Action::Norm) && self.sums.dividing.is_empty();
        let is_over = ensure(is_over, "the norm is missing, or a sum is under way");
        at_the_end(is_over.and(self.nothing_is_here(|_, _| false)))
    }

    /// An error unless the list updates all weights.
    pub fn update(&mut self, program: &Program) -> Result<()> {
        self.go(program, None)?;
        let num_parts: usize = self.setup.state_parts.iter().sum();
        let mut parts = (0..num_parts as u32).map(Action::Update);
        let buckets = 0..self.setup.spec.layout.buckets.len() as u32;
        let is_spread = |bucket| self.done.contains(&Action::Spread(bucket));
        let are_spread = !self.setup.groups.spreads_weights() || buckets.into_iter().all(is_spread);
        let is_full = self.on_the_way > self.setup.groups.max_spreads();
        let all_are_updated = parts.all(|part| self.done.contains(&part));
        at_the_end(
            ensure(all_are_updated && are_spread, "weights are not updated")
                .and(self.may_update())
                .and(ensure(!is_full, "too much is on its way"))
                .and(self.nothing_is_here(|_, _| false)),
        )
    }

    /// Whether items are where they are kept, but for sums that may be here.
    fn nothing_is_here(&self, may_be: impl Fn(&SumPlaces, usize) -> bool) -> Wrong {
        let is_gone = self.here.iter().all(|item| match item {
            Item::Sum(index) => may_be(&self.sums, *index as usize),
            _ => false,
        });
        ensure(is_gone, "an item is not put back")?;
        ensure(self.put.is_empty(), "nobody waits for what is put back")
    }

    fn go(&mut self, program: &Program, passes: Option<&Passes<'_>>) -> Result<()> {
        self.done.clear();
        for (instruction, actions) in program.phases() {
            let of = || {
                instruction.map_or("between the passes".to_string(), |it| {
                    format!("of the {it}")
                })
            };
            let expected = passes.zip(instruction);
            let expected = expected.map(|(passes, instruction)| self.blocks(passes, instruction));
            self.expected = expected.unwrap_or_default();
            self.expected.reverse();
            for (place, &action) in actions.iter().enumerate() {
                if let Err(why) = self.act(action, passes) {
                    bail!(
                        "action {place} {}, {action:?}, is wrong in the list of a rank: {why}",
                        of()
                    );
                }
            }
            if let Some(missing) = self.expected.last() {
                bail!("{missing:?} is missing in the list of a rank {}", of());
            }
        }
        Ok(())
    }

    /// The blocks that an instruction passes.
    fn blocks(&self, passes: &Passes<'_>, instruction: Instruction) -> Vec<Action> {
        let layout = passes.plan.layout();
        let num_frozen = self.setup.spec.num_frozen(layout);
        let of_stage = layout.blocks(instruction.unit().stage);
        let trained = of_stage.clone().filter(|block| *block >= num_frozen).rev();
        let trained = trained.map(|block| block as u32);
        match instruction {
            Instruction::Forward(_) => of_stage
                .map(|block| {
                    let keeps = passes.trains && block >= num_frozen;
                    if keeps {
                        Action::Forward(block as u32)
                    } else {
                        Action::Infer(block as u32)
                    }
                })
                .collect(),
            Instruction::Backward(_) => trained.map(Action::Backward).collect(),
            Instruction::InputGrad(_) => trained.map(Action::InputGrad).collect(),
            Instruction::WeightGrad(_) => trained.map(Action::WeightGrad).collect(),
            Instruction::Send(..) | Instruction::Recv(..) => Vec::new(),
        }
    }

    fn act(&mut self, action: Action, passes: Option<&Passes<'_>>) -> Wrong {
        let groups = self.setup.groups;
        match action {
            Action::Forward(block)
            | Action::Infer(block)
            | Action::Backward(block)
            | Action::InputGrad(block)
            | Action::WeightGrad(block) => {
                let expected = self.expected.pop();
                ensure(expected == Some(action), "another block is to run now")?;
                let passes = passes.ok_or("it belongs to passes")?;
                self.pass(action, block as usize, passes)
            }
            Action::AwaitBlock(_) => self.once(action, groups.spreads_weights()),
            Action::AwaitAllBut(num) => {
                let is_first = num == 0 && self.done.insert(action);
                ensure(
                    is_first || self.on_the_way > num,
                    "so many are on their way at most",
                )?;
                self.on_the_way = self.on_the_way.min(num);
                Ok(())
            }
            Action::Gather(bucket)
            | Action::GatherCopy(bucket)
            | Action::Arrive(bucket)
            | Action::ArriveAndCopy(bucket)
            | Action::Free(bucket) => self.move_weights(action, bucket),
            Action::FreeAll => {
                self.once(action, groups.shards_weights())?;
                self.weights.fill(Weights::Absent);
                self.has_copy.fill(false);
                Ok(())
            }
            Action::MakeGradients(bucket) => {
                let is_whole = std::mem::replace(&mut self.sums.is_whole[bucket as usize], true);
                self.num_writes[bucket as usize] = 0;
                ensure(groups.shards_gradients() && !is_whole, "it is there")
            }
            Action::Reduce(bucket) => self.reduce_bucket(bucket as usize),
            Action::AddReduced(bucket) => {
                let mut dividing = self.sums.dividing.iter();
                let place = dividing.position(|of| *of == bucket as usize);
                let place = place.ok_or("it is not being summed")?;
                self.sums.dividing.remove(place);
                self.use_item(Item::Sum(bucket), self.setup.sums_are_away)
            }
            Action::Square(bucket) => {
                self.use_item(Item::Sum(bucket), self.setup.sums_are_away)?;
                self.settle(bucket as usize)
            }
            Action::Settle(bucket) => {
                let is_divided = groups.shards_gradients();
                for stage in self.setup.spec.layout.stages_of(bucket as usize) {
                    self.use_item(Item::Sum(stage as u32), self.setup.sums_are_away)?;
                    let is_started = std::mem::replace(&mut self.sums.is_started[stage], false);
                    ensure(is_started != is_divided, "its sum has not begun")?;
                }
                self.settle(bucket as usize)
            }
            Action::Norm => {
                let buckets = 0..self.setup.spec.layout.buckets.len();
                let all_are_settled = buckets.into_iter().all(|index| self.sums.is_settled[index]);
                ensure(all_are_settled, "a bucket is not summed")?;
                for bucket in compared_copies(&self.setup) {
                    self.use_item(Item::Sum(bucket as u32), true)?;
                }
                self.once(action, true)
            }
            Action::Fetch(_)
            | Action::Put(_)
            | Action::Drop(_)
            | Action::FlushSums
            | Action::FlushUpdates => self.move_item(action),
            Action::Update(part) => {
                let bucket = self.uses.bucket_of_part[part as usize] as u32;
                self.may_update()?;
                self.use_item(Item::Sum(bucket), self.setup.sums_are_away)?;
                self.use_item(Item::Weights(bucket), groups.offloads_weights)?;
                self.use_item(Item::State(part), self.setup.state_is_away)?;
                self.once(action, true)
            }
            Action::Spread(bucket) => {
                let parts = self.uses.bucket_of_part.iter().enumerate();
                let mut own = parts.filter(|(_, of)| **of == bucket as usize);
                let is_updated =
                    own.all(|(part, _)| self.done.contains(&Action::Update(part as u32)));
                ensure(is_updated, "it is not updated")?;
                ensure(
                    self.on_the_way < groups.max_spreads().max(1),
                    "too much is on its way",
                )?;
                self.on_the_way += 1;
                self.once(action, groups.spreads_weights())
            }
        }
    }

    fn move_weights(&mut self, action: Action, bucket: u32) -> Wrong {
        let groups = self.setup.groups;
        match action {
            Action::Gather(_) => {
                self.residence(bucket, Weights::Absent, Weights::Gathering)?;
                self.take(Item::Weights(bucket), groups.offloads_weights)
            }
            Action::GatherCopy(_) => {
                self.residence(bucket, Weights::Absent, Weights::Gathering)?;
                ensure(self.has_copy[bucket as usize], "there is no copy")
            }
            Action::ArriveAndCopy(_) => {
                let had_copy = std::mem::replace(&mut self.has_copy[bucket as usize], true);
                self.residence(bucket, Weights::Gathering, Weights::Present)?;
                ensure(!had_copy, "there is a copy")
            }
            Action::Arrive(_) if groups.shard.world_size() > 1 => {
                self.residence(bucket, Weights::Gathering, Weights::Present)
            }
            Action::Arrive(_) => {
                self.residence(bucket, Weights::Absent, Weights::Present)?;
                self.take(Item::Weights(bucket), true)
            }
            _ => self.residence(bucket, Weights::Present, Weights::Absent),
        }
    }

    fn move_item(&mut self, action: Action) -> Wrong {
        match action {
            Action::Fetch(item) => {
                let is_away = self.is_kept_away(item) && self.here.insert(item);
                ensure(is_away, "it is here")
            }
            Action::Put(item) => {
                self.take(item, true)?;
                self.put.insert(item);
                Ok(())
            }
            Action::Drop(item) => self.take(item, true),
            Action::FlushSums => self.flush(|item| matches!(item, Item::Sum(_))),
            Action::FlushUpdates => self.flush(|item| !matches!(item, Item::Sum(_))),
            _ => Err("it moves no item"),
        }
    }

    /// A pass of a block, or a half of one.
    fn pass(&mut self, action: Action, block: usize, passes: &Passes<'_>) -> Wrong {
        let groups = self.setup.groups;
        let is_kept = passes.trains && block + 1 == passes.plan.layout().num_blocks();
        let needs_weights = match action {
            // The input of a head that trains is kept.
            Action::Forward(_) => !is_kept,
            Action::WeightGrad(_) => false,
            _ => true,
        };
        let awaits = needs_weights && groups.spreads_weights();
        ensure(
            !awaits || self.done.contains(&Action::AwaitBlock(block as u32)),
            "its updated weights may be on their way",
        )?;
        for &index in self.uses.gathered(block).iter().filter(|_| needs_weights) {
            let is_there = self.weights[index] == Weights::Present;
            ensure(is_there, "its weights are not there")?;
        }
        ensure(
            !passes.trains || self.is_freed(),
            "weights may be left of earlier passes",
        )?;
        let writes = matches!(action, Action::Backward(_) | Action::WeightGrad(_));
        for &index in self.uses.written(block).iter().filter(|_| writes) {
            self.num_writes[index] += 1;
            let is_divided = groups.shards_gradients();
            ensure(
                self.sums.is_whole[index] || !is_divided,
                "its gradients are not made",
            )?;
            let is_over = self.sums.is_started[index] || self.sums.is_settled[index];
            ensure(!is_over, "the sum of its gradients has begun")?;
            let is_away = self.setup.sums_are_away && !is_divided;
            self.use_item(Item::Sum(index as u32), is_away)?;
        }
        if writes && let Some(owed) = self.owed.get_mut(&block) {
            *owed = owed
                .checked_sub(1)
                .ok_or("it has been done for all micro-batches")?;
        }
        Ok(())
    }

    fn reduce_bucket(&mut self, index: usize) -> Wrong {
        let bucket = self.setup.spec.layout.gradient_bucket(index);
        let passes_are_over = self.owed.is_empty();
        if self.setup.groups.shards_gradients() {
            let is_whole = std::mem::replace(&mut self.sums.is_whole[index], false);
            let is_written = passes_are_over || self.num_writes[index] == bucket.blocks.len();
            self.sums.dividing.push_back(index);
            return ensure(
                is_whole && is_written,
                "it is not written by all of its blocks",
            );
        }
        let mut blocks = bucket.blocks.iter();
        let is_owed = blocks.any(|block| self.owed.get(block).is_some_and(|owed| *owed > 0));
        let was_started = std::mem::replace(&mut self.sums.is_started[index], true);
        ensure(!is_owed, "blocks are still to write to it")?;
        ensure(
            !was_started && !self.sums.is_settled[index],
            "its sum has begun",
        )?;
        self.use_item(Item::Sum(index as u32), self.setup.sums_are_away)
    }

    /// The sum of a bucket is over.
    fn settle(&mut self, index: usize) -> Wrong {
        let layout = &self.setup.spec.layout;
        for stage in layout.stages_of(index) {
            let is_open = self.sums.dividing.contains(&stage) || self.sums.is_whole[stage];
            ensure(!is_open, "it is being summed")?;
            let mut blocks = layout.gradient_bucket(stage).blocks.iter();
            let is_owed = blocks.any(|block| self.owed.get(block).is_some_and(|owed| *owed > 0));
            ensure(!is_owed, "blocks are still to write to it")?;
        }
        let was_settled = std::mem::replace(&mut self.sums.is_settled[index], true);
        ensure(!was_settled, "its sum is over")
    }

    /// Whether no weights are left of earlier passes.
    fn is_freed(&self) -> bool {
        !self.setup.groups.shards_weights() || self.done.contains(&Action::FreeAll)
    }

    /// Whether weights can be updated: none are gathered or on their way.
    fn may_update(&self) -> Wrong {
        let spreads = self.setup.groups.spreads_weights();
        let has_come = !spreads || self.done.contains(&Action::AwaitAllBut(0));
        ensure(has_come, "weights may be on their way")?;
        ensure(self.is_freed(), "weights may be gathered")
    }

    fn once(&mut self, action: Action, is_called_for: bool) -> Wrong {
        ensure(
            is_called_for && self.done.insert(action),
            "it is not called for",
        )
    }

    fn residence(&mut self, bucket: u32, from: Weights, to: Weights) -> Wrong {
        let was = std::mem::replace(&mut self.weights[bucket as usize], to);
        ensure(was == from, "its weights are elsewhere")
    }

    fn is_kept_away(&self, item: Item) -> bool {
        match item {
            Item::Weights(_) => self.setup.groups.offloads_weights,
            Item::Sum(_) => self.setup.sums_are_away,
            Item::State(_) => self.setup.state_is_away,
        }
    }

    /// An item that is used must be here, if it is kept away.
    fn use_item(&self, item: Item, is_away: bool) -> Wrong {
        ensure(!is_away || self.here.contains(&item), "an item is not here")
    }

    fn take(&mut self, item: Item, is_away: bool) -> Wrong {
        ensure(!is_away || self.here.remove(&item), "an item is not here")
    }

    fn flush(&mut self, is_such: impl Fn(&Item) -> bool) -> Wrong {
        let num_before = self.put.len();
        self.put.retain(|item| !is_such(item));
        ensure(self.put.len() < num_before, "nothing was put back")
    }
}

fn at_the_end(wrong: Wrong) -> Result<()> {
    wrong.map_err(|why| Error::msg(format!("the list of a rank is wrong at its end: {why}")))
}
