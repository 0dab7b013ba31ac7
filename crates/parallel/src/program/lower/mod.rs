//! From the list of passes of a rank to everything that it does in a step.

mod sums;
mod update;
mod weights;

use std::collections::BTreeMap;

use candle_core::Result;

use super::check::Check;
use super::{Action, Item, Program};
use crate::params::{Bucket, Parameters, RankSpec, ReplicaGroups};
use crate::schedule::{Instruction, Plan};
pub(crate) use sums::SumPlaces;
use sums::Sums;
pub(super) use sums::compared_copies;
use weights::Weights;

/// All that decides the actions of a rank, beside its passes.
#[derive(Clone, Copy)]
pub(crate) struct Setup<'a> {
    pub spec: &'a RankSpec,
    pub groups: &'a ReplicaGroups,
    /// Whether sums of gradients are on the device for their uses only.
    pub sums_are_away: bool,
    /// In how many parts the optimizer updates each bucket. The items of its state are these parts, bucket after bucket.
    pub state_parts: &'a [usize],
    /// Whether its state is on the device for its uses only.
    pub state_is_away: bool,
}

impl<'a> Setup<'a> {
    /// The bucket of each part of the optimizer's state.
    pub fn bucket_of_part(&self) -> Vec<usize> {
        let parts = self.state_parts.iter().enumerate();
        let buckets = parts.flat_map(|(bucket, num_parts)| std::iter::repeat_n(bucket, *num_parts));
        buckets.collect()
    }

    /// Whether what is written of a bucket of gradients is to be whole after one half of a backward pass, as it is divided or goes away then.
    pub fn sums_come_once(&self) -> bool {
        self.groups.shards_gradients() || self.sums_are_away
    }

    /// Whether the weights of a bucket are here for passes only, tile by tile.
    pub fn comes_in_tiles(&self, bucket: &Bucket) -> bool {
        self.groups.shards_weights() && bucket.is_tiled
    }

    /// That of a rank that has built its model, without an optimizer.
    pub fn of_rank(params: &'a Parameters, sums_are_away: bool) -> Self {
        Self {
            spec: params.of_rank(),
            groups: params.groups(),
            sums_are_away,
            state_parts: &[],
            state_is_away: false,
        }
    }
}

/// Buckets that the passes of each block use.
pub(crate) struct Uses {
    /// Buckets of weights that are gathered for a block.
    gathered: BTreeMap<usize, Vec<usize>>,
    /// Buckets of gradients that a block writes to.
    written: BTreeMap<usize, Vec<usize>>,
    /// The bucket of each part of the optimizer's state.
    pub bucket_of_part: Vec<usize>,
}

impl Uses {
    pub fn new(setup: &Setup<'_>) -> Self {
        let layout = &setup.spec.layout;
        let [mut gathered, mut written]: [BTreeMap<usize, Vec<usize>>; 2] = Default::default();
        for (index, bucket) in layout.all().enumerate() {
            let is_gathered = setup.groups.shards_weights() && !bucket.is_tiled;
            let slots = bucket.slots.iter().filter(|_| is_gathered);
            for &block in slots.flat_map(|slot| &setup.spec.params[slot.param].blocks) {
                let needed = gathered.entry(block).or_default();
                if !needed.contains(&index) {
                    needed.push(index);
                }
            }
        }
        for (index, bucket) in layout.of_gradients().enumerate() {
            for &block in &bucket.blocks {
                written.entry(block).or_default().push(index);
            }
        }
        Self {
            gathered,
            written,
            bucket_of_part: setup.bucket_of_part(),
        }
    }

    /// Buckets of weights that are gathered for a block.
    pub fn gathered(&self, block: usize) -> &[usize] {
        self.gathered.get(&block).map_or(&[], Vec::as_slice)
    }

    /// Buckets of gradients that a block writes to.
    pub fn written(&self, block: usize) -> &[usize] {
        self.written.get(&block).map_or(&[], Vec::as_slice)
    }
}

/// The passes of a step, or of an evaluation.
#[derive(Clone, Copy)]
pub(crate) struct Passes<'a> {
    pub plan: &'a Plan,
    /// The rank's instructions, with or without the messages between ranks.
    pub list: &'a [Instruction],
    /// Whether passes go backward, too.
    pub trains: bool,
}

/// The places of sums and second copies before a list.
#[derive(Clone)]
pub(super) struct Places {
    pub sums: SumPlaces,
    /// Buckets of weights of which this rank has its part of a second copy.
    pub has_copy: Vec<bool>,
}

/// Lowers what a rank does, part after part.
pub(crate) struct Lowering<'a> {
    setup: Setup<'a>,
    uses: Uses,
    num_frozen: usize,
    weights: Weights,
    sums: Sums,
    out: Program,
}

impl<'a> Lowering<'a> {
    /// For a rank whose slices and sums are where they are kept, with nothing under way.
    pub fn new(setup: Setup<'a>) -> Self {
        Self {
            uses: Uses::new(&setup),
            weights: Weights::new(setup.spec.num_buckets()),
            sums: Sums::new(setup.spec.layout.num_gradient_buckets()),
            num_frozen: 0,
            out: Program::default(),
            setup,
        }
    }

    /// A rank with sums in these places.
    pub fn with_sums(mut self, places: SumPlaces) -> Self {
        self.sums.places = places;
        self
    }

    /// A rank with second copies of these buckets of weights.
    pub fn with_copies(mut self, has_copy: Vec<bool>) -> Self {
        self.weights.has_copy = has_copy;
        self
    }

    fn push(&mut self, action: Action) {
        self.out.push(action);
    }

    fn take(&mut self) -> Program {
        self.out.end_phase(None);
        std::mem::take(&mut self.out)
    }

    /// The places before the next list.
    pub(super) fn places(&self) -> Places {
        Places {
            sums: self.sums.places.clone(),
            has_copy: self.weights.has_copy.clone(),
        }
    }

    /// The passes.
    ///
    /// # Errors
    /// A list that is wrong; so for the others.
    pub fn passes(&mut self, passes: &Passes<'_>) -> Result<Program> {
        let places = self.places();
        let layout = passes.plan.layout();
        let blocks = layout.stages_of(self.setup.spec.pp_rank);
        let blocks = blocks.flat_map(|stage| layout.blocks(stage));
        self.sums
            .begin_passes(blocks, passes.plan.num_micro_batches());
        self.weights.begin_passes();
        self.num_frozen = self.setup.spec.num_frozen(layout);
        if passes.trains {
            self.free_all_weights();
        }
        self.out.end_phase(None);
        // The block that the rank runs after each instruction.
        let mut next = None;
        let mut after = Vec::with_capacity(passes.list.len());
        for &instruction in passes.list.iter().rev() {
            after.push(next);
            next = self.blocks(passes, instruction).next().or(next);
        }
        for &instruction in passes.list {
            let after = after.pop().flatten();
            self.instruction(passes, instruction, after);
            self.out.end_phase(Some(instruction));
        }
        if passes.trains {
            self.flush_sums();
        }
        let program = self.take();
        Check::new(self.setup, &self.uses, places).passes(&program, passes)?;
        Ok(program)
    }

    /// The sums of gradients after the passes, and the norm.
    pub fn reduce(&mut self) -> Result<Program> {
        let places = self.places();
        self.reduce_sums();
        let program = self.take();
        Check::new(self.setup, &self.uses, places).reduce(&program)?;
        Ok(program)
    }

    /// The update of the weights.
    pub fn update(&mut self) -> Result<Program> {
        let places = self.places();
        self.update_buckets();
        let program = self.take();
        Check::new(self.setup, &self.uses, places).update(&program)?;
        Ok(program)
    }

    /// The blocks whose weights an instruction uses, in its order.
    fn blocks(
        &self,
        passes: &Passes<'_>,
        instruction: Instruction,
    ) -> impl Iterator<Item = usize> + use<> {
        let layout = passes.plan.layout();
        let blocks = layout.blocks(instruction.unit().stage);
        let num_frozen = self.num_frozen;
        let (forward, backward) = match instruction {
            // A head that trains computes in the backward pass.
            Instruction::Forward(_) => {
                let head = layout.num_blocks() - usize::from(passes.trains);
                (blocks.start..blocks.end.min(head), 0..0)
            }
            Instruction::Backward(_) | Instruction::InputGrad(_) => {
                (0..0, blocks.start.max(num_frozen)..blocks.end)
            }
            _ => (0..0, 0..0),
        };
        forward.chain(backward.rev())
    }

    /// `after` is the block that the rank runs next.
    fn instruction(&mut self, passes: &Passes<'_>, instruction: Instruction, after: Option<usize>) {
        let layout = passes.plan.layout();
        let num_frozen = self.num_frozen;
        let blocks = layout.blocks(instruction.unit().stage);
        let mut used = self.blocks(passes, instruction).peekable();
        while let Some(block) = used.next() {
            let next = used.peek().copied().or(after);
            let number = block as u32;
            self.with_weights(block, next, |lowering| match instruction {
                Instruction::Backward(_) => {
                    lowering.write_gradients(block);
                    lowering.push(Action::Backward(number));
                }
                // Gradients of weights that come early are of whole sums that are here.
                Instruction::InputGrad(_) => lowering.push(Action::InputGrad(number)),
                _ if passes.trains && block >= num_frozen => {
                    lowering.push(Action::Forward(number));
                }
                _ => lowering.push(Action::Infer(number)),
            });
            if let Instruction::Backward(_) = instruction {
                self.block_done(block);
            }
        }
        match instruction {
            Instruction::Forward(_) if passes.trains && blocks.end == layout.num_blocks() => {
                // Its input is kept.
                self.push(Action::Forward(blocks.end as u32 - 1));
            }
            Instruction::WeightGrad(_) => {
                for block in (blocks.start.max(num_frozen)..blocks.end).rev() {
                    self.write_gradients(block);
                    self.push(Action::WeightGrad(block as u32));
                    self.block_done(block);
                }
            }
            _ => {}
        }
    }
}

/// Items that are changed one after another: the next one comes while one is changed.
#[derive(Default)]
struct Ahead(Option<Item>);

impl Ahead {
    /// The change of `item` begins; `next` is changed after it.
    fn begin(&mut self, item: Item, next: Option<Item>, out: &mut Program) {
        if self.0 != Some(item) {
            out.push(Action::Fetch(item));
        }
        self.0 = next;
        if let Some(next) = next {
            out.push(Action::Fetch(next));
        }
    }
}
