//! The bytes that the actions of a program hold and free.

use std::collections::VecDeque;

use candle_core::{DType, Result};
use candle_ops::QuantizedType;

use super::tiles::PlannedTile;
use super::waiting::{PlannedWaiting, WaitingFor};
use super::{GRADIENT_BYTES, Moment, PlannedPasses, PlannedStep};
use crate::data_parallel::ReduceType;
use crate::memory::{MemoryCategory, MemoryReport, MemoryUse};
use crate::offload::{Lane, OffloadPlace};
use crate::params::{Bucket, HeldParam, Sharing, is_adopted, packed_bytes};
use crate::program::{Action, Item, Program, Setup};
use crate::schedule::{Instruction, Message, Unit};

/// Counts the bytes that a rank holds, action after action.
pub(super) struct RankBytes<'a> {
    pub setup: Setup<'a>,
    passes: Option<PlannedPasses<'a>>,
    trains: bool,
    num_frozen: usize,
    held: HeldBytes,
    /// Activations, if they are away between passes.
    waiting: Option<PlannedWaiting>,
    /// Bytes of each bucket of weights that are gathered, fetched or on their way.
    gathered: Vec<usize>,
    /// Bytes of this rank's parts of second copies.
    copies: usize,
    /// Bytes of each item of weights, of sums, of state.
    items: &'a [Vec<usize>; 3],
    /// Items on their way back: weights, a sum, state.
    behind: [Option<Item>; 3],
    /// Updated weights on their way: the first block that uses them, and bytes of a buffer for them.
    pending: VecDeque<(usize, usize)>,
}

/// Bytes that are held now, and the most since the moment began.
#[derive(Default)]
pub(super) struct HeldBytes {
    now: [u64; MemoryCategory::ALL.len()],
    most: [u64; MemoryCategory::ALL.len()],
    most_of_all: u64,
}

impl HeldBytes {
    pub fn hold(&mut self, category: MemoryCategory, bytes: usize) {
        let place = category as usize;
        self.now[place] += bytes as u64;
        self.most[place] = self.most[place].max(self.now[place]);
        self.most_of_all = self.most_of_all.max(self.on_device());
    }

    fn on_device(&self) -> u64 {
        let categories = MemoryCategory::ALL.into_iter();
        let on_device = categories.filter(|category| category.is_on_device());
        on_device.map(|category| self.now[category as usize]).sum()
    }

    /// Frees bytes that are held.
    pub fn free(&mut self, category: MemoryCategory, bytes: usize) {
        let now = &mut self.now[category as usize];
        *now = now.saturating_sub(bytes as u64);
    }

    /// Holds bytes for a moment.
    fn pass(&mut self, category: MemoryCategory, bytes: usize) {
        self.hold(category, bytes);
        self.free(category, bytes);
    }

    fn report(&self) -> MemoryReport {
        MemoryReport::new(|category| MemoryUse {
            now: self.now[category as usize],
            peak: self.most[category as usize],
        })
    }

    /// Ends a moment.
    fn moment(&mut self, instruction: Option<Instruction>) -> Moment {
        let moment = Moment {
            instruction,
            report: self.report(),
            peak: self.most_of_all,
        };
        self.most = self.now;
        self.most_of_all = self.on_device();
        moment
    }
}

impl<'a> RankBytes<'a> {
    /// A rank before its first step.
    ///
    /// # Errors
    /// Blocks that do not say what they keep.
    pub fn new(step: &'a PlannedStep<'a>) -> Result<Self> {
        let PlannedStep {
            spec, groups, work, ..
        } = step;
        let (spec, setup, trains) = (*spec, step.setup(), step.trains);
        if let Some(passes) = work.passes.as_ref().filter(|_| trains) {
            passes.check()?;
        }
        let mut held = HeldBytes::default();
        let [weights, sums, states] = &step.item_bytes;
        let packs = !groups.shards_weights() && !groups.offloads_weights && !work.on_gpu;
        let stays_packed = |param: &&HeldParam| {
            let is_used = work.passes.is_some() && (trains || !param.trainable);
            let is_packed = param.is_multiplied && work.pack_weights.includes(param.trainable);
            packs && is_packed && is_used
        };
        let packed = spec.params.iter().filter(stays_packed);
        let packed = packed.map(|param| packed_bytes(&param.shape, param.dtype));
        held.hold(MemoryCategory::Packed, packed.sum());
        let whole = spec.params.iter().map(HeldParam::num_bytes).sum();
        let of_weights = if groups.shards_weights() {
            weights.iter().sum()
        } else {
            whole
        };
        let mut keep = |place: OffloadPlace<'_>, category, bytes: usize| {
            held.hold(place.category().unwrap_or(category), bytes);
        };
        // Whichever folder a rank has.
        let (offload, on_gpu) = (work.offload, work.on_gpu);
        keep(
            offload.place_of_params(0, on_gpu),
            MemoryCategory::Weights,
            of_weights,
        );
        let place = offload.place_of_gradients(0, on_gpu);
        keep(place, MemoryCategory::Gradients, sums.iter().sum());
        let place = offload.place_of_optimizer(0, on_gpu);
        keep(place, MemoryCategory::Optimizer, states.iter().sum());
        let place = offload.place_of_activations(0, on_gpu);
        Ok(Self {
            waiting: PlannedWaiting::new(place, offload.kept_activations),
            gathered: vec![0; spec.num_buckets()],
            copies: 0,
            items: &step.item_bytes,
            behind: [None; 3],
            pending: VecDeque::new(),
            num_frozen: work
                .passes
                .map_or(0, |passes| spec.num_frozen(passes.plan.layout())),
            passes: work.passes,
            setup,
            trains,
            held,
        })
    }

    /// Goes through a program, of which each instruction is a moment. `see` is told what is held after each action.
    pub fn run(
        &mut self,
        program: &Program,
        see: &mut dyn FnMut(Action, MemoryReport),
    ) -> Vec<Moment> {
        let mut moments = Vec::new();
        for (instruction, actions) in program.phases() {
            if let Some(instruction) = instruction {
                self.take_border(instruction);
            }
            for &action in actions {
                self.action(action, instruction.map(Instruction::unit));
                see(action, self.held.report());
            }
            if let Some(instruction) = instruction {
                self.give_border(instruction);
                moments.push(self.held.moment(Some(instruction)));
            }
        }
        moments
    }

    /// Ends what follows the instructions of a step.
    pub fn end_step(&mut self) -> Moment {
        self.held.moment(None)
    }

    fn action(&mut self, action: Action, unit: Option<Unit>) {
        let (buffers, gathered) = (MemoryCategory::Buffers, MemoryCategory::Gathered);
        match action {
            Action::Forward(block) => self.forward(block as usize, unit, true),
            Action::Infer(block) => self.forward(block as usize, unit, false),
            Action::Backward(block) => self.backward(block as usize, unit, true),
            Action::InputGrad(block) => self.backward(block as usize, unit, false),
            Action::WeightGrad(block) => {
                let waiting = self.waiting_bytes(block as usize);
                self.held.free(MemoryCategory::Activations, waiting);
            }
            Action::AwaitBlock(block) => {
                self.await_while(|_, first| first <= block as usize);
            }
            Action::AwaitAllBut(num) => self.await_while(|len, _| len > num as usize),
            Action::Gather(bucket) => self.gather(bucket as usize, Self::moved_bytes),
            Action::GatherCopy(bucket) => {
                self.gather(bucket as usize, |_, bucket| bucket.num_bytes())
            }
            Action::Arrive(bucket) => self.arrive(bucket as usize),
            Action::ArriveAndCopy(bucket) => {
                if let Some(secondary) = &self.setup.groups.secondary {
                    let part = self.bucket(bucket as usize).num_bytes() / secondary.world_size();
                    self.copies += part;
                    self.held.hold(gathered, part);
                }
                self.arrive(bucket as usize);
            }
            Action::Free(bucket) => {
                let bytes = std::mem::take(&mut self.gathered[bucket as usize]);
                self.held.free(gathered, bytes);
            }
            Action::FreeAll => {
                let all = self.gathered.iter_mut().map(std::mem::take);
                let bytes = all.sum::<usize>() + std::mem::take(&mut self.copies);
                self.held.free(gathered, bytes);
            }
            Action::MakeGradients(bucket) => self.held.hold(buffers, self.gradient_bytes(bucket)),
            Action::Reduce(bucket) => self.held.hold(buffers, self.sent_bytes(bucket as usize)),
            Action::AddReduced(bucket) => {
                let bytes = self.sent_bytes(bucket as usize) + self.gradient_bytes(bucket);
                self.held.free(buffers, bytes);
            }
            Action::Settle(bucket) if !self.setup.groups.shards_gradients() => {
                for stage in self.setup.spec.layout.stages_of(bucket as usize) {
                    self.held.free(buffers, self.sent_bytes(stage));
                }
            }
            Action::Settle(_) | Action::Square(_) | Action::Norm | Action::Update(_) => {}
            Action::Fetch(item) => {
                let (category, bytes) = self.item(item);
                self.held.hold(category, bytes);
                if let Item::Weights(bucket) = item {
                    self.gathered[bucket as usize] = bytes;
                }
            }
            Action::Put(item) => {
                if let Item::Weights(bucket) = item {
                    self.gathered[bucket as usize] = 0;
                }
                let written = self.behind[item.place()[0]].replace(item);
                self.drop_item(written);
            }
            Action::Drop(item) => self.drop_item(Some(item)),
            Action::FlushSums => {
                let written = self.behind[Item::Sum(0).place()[0]].take();
                self.drop_item(written);
            }
            Action::FlushUpdates => {
                for of in [Item::Weights(0), Item::State(0)] {
                    let written = self.behind[of.place()[0]].take();
                    self.drop_item(written);
                }
            }
            Action::Spread(bucket) => self.spread(bucket as usize),
        }
    }

    fn item(&self, item: Item) -> (MemoryCategory, usize) {
        let category = match item {
            Item::Weights(_) => MemoryCategory::Gathered,
            Item::Sum(_) => MemoryCategory::Gradients,
            Item::State(_) => MemoryCategory::Optimizer,
        };
        let [kind, index] = item.place();
        (category, self.items[kind][index])
    }

    fn drop_item(&mut self, item: Option<Item>) {
        if let Some(item) = item {
            let (category, bytes) = self.item(item);
            self.held.free(category, bytes);
        }
    }

    /// Updated weights arrive while `is_needed` says so of how many are on their way and of the first block that uses the next ones.
    fn await_while(&mut self, is_needed: impl Fn(usize, usize) -> bool) {
        while let Some(&(first, bytes)) = self.pending.front()
            && is_needed(self.pending.len(), first)
        {
            self.pending.pop_front();
            self.held.free(MemoryCategory::Buffers, bytes);
        }
    }

    fn spread(&mut self, index: usize) {
        let bucket = self.bucket(index);
        // Weights in f32 pass through the buffer of the gradients, if that is there.
        let has_buffer =
            self.trains && !self.setup.sums_are_away && !self.setup.groups.shards_gradients();
        let passes_through = has_buffer && bucket.dtype == DType::F32;
        let bytes = if passes_through {
            0
        } else {
            bucket.num_bytes()
        };
        self.held.hold(MemoryCategory::Buffers, bytes);
        self.pending.push_back((bucket.block, bytes));
    }

    fn bucket(&self, index: usize) -> &'a Bucket {
        self.setup.spec.layout.bucket(index)
    }

    fn gradient_bytes(&self, index: u32) -> usize {
        GRADIENT_BYTES * self.setup.spec.layout.gradient_bucket(index as usize).len
    }

    /// Bytes of the copy of a bucket of gradients that ranks send, if they do not send the bucket itself, and of its result.
    fn sent_bytes(&self, index: usize) -> usize {
        let bucket = self.setup.spec.layout.gradient_bucket(index);
        let num_slices = self.setup.groups.shard.world_size();
        let form = self.setup.groups.reduce_type(bucket);
        match form.quantized() {
            Some(packed) => 2 * num_slices * packed.row_bytes(bucket.len / num_slices),
            None if form == ReduceType::Bf16 => {
                DType::BF16.size_in_bytes() * (bucket.len + bucket.len / num_slices)
            }
            None => 0,
        }
    }

    /// Whether the weights of a bucket are gathered in 8 bits.
    pub fn is_quantized(&self, bucket: &Bucket) -> bool {
        let moves =
            self.setup.groups.shard.world_size() > 1 && self.setup.groups.config.quantize_weights;
        moves && bucket.sharing == Sharing::None && bucket.dtype != DType::U8
    }

    /// Bytes of a bucket of weights on its way, with the copy that is sent in 8 bits.
    fn moved_bytes(&self, bucket: &Bucket) -> usize {
        let num_slices = self.setup.groups.shard.world_size();
        if self.is_quantized(bucket) {
            // And the copy that is sent.
            (num_slices + 1) * QuantizedType::Int8.row_bytes(bucket.len / num_slices)
        } else {
            bucket.num_bytes()
        }
    }

    fn gather(&mut self, index: usize, moved: impl Fn(&Self, &Bucket) -> usize) {
        let bytes = moved(self, self.bucket(index));
        self.held.hold(MemoryCategory::Gathered, bytes);
        let fetched = std::mem::replace(&mut self.gathered[index], bytes);
        self.held.free(MemoryCategory::Gathered, fetched);
    }

    /// Gives the parameters of a bucket their values.
    fn arrive(&mut self, index: usize) {
        let (gathered, bucket) = (MemoryCategory::Gathered, self.bucket(index));
        let of_slots = bucket.slots.iter();
        let of_slots = of_slots.map(|slot| self.setup.spec.params[slot.param].num_bytes());
        let (all, whole): (Vec<usize>, usize) = (of_slots.collect(), bucket.num_bytes());
        let others: usize = all.iter().skip(1).sum();
        let adopts = is_adopted(others, whole);
        let copied = if adopts { others } else { all.iter().sum() };
        self.held.free(gathered, self.gathered[index]);
        self.held.hold(gathered, whole + copied);
        if !adopts {
            self.held.free(gathered, whole);
        }
        self.gathered[index] = if adopts { whole + copied } else { copied };
    }

    fn forward(&mut self, block: usize, unit: Option<Unit>, keeps_tape: bool) {
        let (Some(passes), Some(unit)) = (self.passes, unit) else {
            return;
        };
        let activations = MemoryCategory::Activations;
        let layout = passes.plan.layout();
        let is_head = block + 1 == layout.num_blocks();
        if !is_head || !self.trains {
            self.use_tiles(block);
        }
        let waits = keeps_tape && self.waits(&passes, block);
        let is_first = block == layout.blocks(unit.stage).start;
        let is_given = is_first && self.comes_back(&passes, unit, Message::Activation);
        let what = waiting_for(Lane::Activations, unit, block);
        let input = passes.input_bytes(block);
        match (is_given, waits) {
            (true, false) => self.take_waiting(what, input),
            (false, true) => self.put_waiting(what, input),
            _ => {}
        }
        if keeps_tape && !waits {
            self.held.hold(activations, passes.kept_bytes(block));
        }
        if waits && !is_head {
            // The block's output is here beside those that wait.
            self.held.pass(activations, passes.input_bytes(block + 1));
        }
    }

    fn backward(&mut self, block: usize, unit: Option<Unit>, is_whole: bool) {
        let (Some(passes), Some(unit)) = (self.passes, unit) else {
            return;
        };
        let activations = MemoryCategory::Activations;
        self.use_tiles(block);
        if self.waits(&passes, block) {
            let what = waiting_for(Lane::Activations, unit, block);
            self.take_waiting(what, passes.input_bytes(block));
        } else {
            self.held.free(activations, passes.kept_bytes(block));
        }
        if !is_whole {
            self.held.hold(activations, self.waiting_bytes(block));
        }
        // The gradient for the block before it.
        if block > self.num_frozen || unit.stage > 0 {
            self.held.pass(activations, passes.input_bytes(block));
        }
    }

    /// Takes what a stage of this rank has given for this one.
    fn take_border(&mut self, instruction: Instruction) {
        let (Some(passes), unit) = (self.passes, instruction.unit()) else {
            return;
        };
        let end = passes.plan.layout().blocks(unit.stage).end;
        let goes_backward = instruction.input() == Some(Message::Gradient);
        if goes_backward && self.comes_back(&passes, unit, Message::Gradient) {
            let what = waiting_for(Lane::Gradients, unit, end);
            self.take_waiting(what, passes.input_bytes(end));
        }
    }

    /// Gives what another stage of this rank is to take.
    fn give_border(&mut self, instruction: Instruction) {
        let (Some(passes), unit) = (self.passes, instruction.unit()) else {
            return;
        };
        let layout = passes.plan.layout();
        let blocks = layout.blocks(unit.stage);
        match instruction.input() {
            Some(Message::Activation) if blocks.end < layout.num_blocks() => {
                let output = passes.input_bytes(blocks.end);
                if self.trains {
                    self.held.pass(MemoryCategory::Activations, output);
                }
                if self.is_given_here(&passes, unit.stage + 1, unit.stage) {
                    self.put_waiting(waiting_for(Lane::Activations, unit, blocks.end), output);
                }
            }
            // Also to a stage that is frozen: this one does not know it.
            Some(Message::Gradient)
                if unit.stage > 0 && self.is_given_here(&passes, unit.stage - 1, unit.stage) =>
            {
                let what = waiting_for(Lane::Gradients, unit, blocks.start);
                self.put_waiting(what, passes.input_bytes(blocks.start));
            }
            _ => {}
        }
    }

    /// Bytes that wait for the weight half of a block.
    fn waiting_bytes(&self, block: usize) -> usize {
        let come_once = self.setup.sums_come_once();
        self.passes.map_or(0, |passes| {
            let early = passes.plan.early(come_once);
            passes.waiting_bytes(block, early.large, !self.setup.groups.shards_weights())
        })
    }

    /// Whether what the tape keeps of a block is its input, away until the backward pass.
    fn waits(&self, passes: &PlannedPasses<'_>, block: usize) -> bool {
        self.waiting.is_some() && passes.keeps_input(block) && block > 0
    }

    /// Whether two stages are on this rank, and what one gives the other is away until that takes it.
    fn is_given_here(&self, passes: &PlannedPasses<'_>, to: usize, from: usize) -> bool {
        let layout = passes.plan.layout();
        self.waiting.is_some() && layout.rank_of(to) == layout.rank_of(from)
    }

    /// Whether what a unit gets waits away from the device of this rank.
    fn comes_back(&self, passes: &PlannedPasses<'_>, unit: Unit, what: Message) -> bool {
        let num_stages = passes.plan.layout().num_stages();
        let giving = match what {
            Message::Activation => unit.stage.checked_sub(1),
            Message::Gradient => Some(unit.stage + 1).filter(|&stage| stage < num_stages),
        };
        giving.is_some_and(|giving| self.is_given_here(passes, unit.stage, giving))
    }

    fn put_waiting(&mut self, what: WaitingFor, bytes: usize) {
        if let Some(waiting) = &mut self.waiting {
            waiting.put(what, bytes, &mut self.held);
        }
    }

    fn take_waiting(&mut self, what: WaitingFor, bytes: usize) {
        if let Some(waiting) = &mut self.waiting {
            waiting.take(what, bytes, &mut self.held);
        }
    }

    /// The weights of a block that come tile by tile.
    fn use_tiles(&mut self, block: usize) {
        let (gathered, overlap) = (MemoryCategory::Gathered, self.setup.groups.config.overlap);
        for tiles in PlannedTile::of_block(self, block) {
            for (index, tile) in tiles.iter().enumerate() {
                if index == 0 || !overlap {
                    self.held.hold(gathered, tile.on_the_way);
                }
                self.held.hold(gathered, tile.joined);
                self.held.free(gathered, tile.on_the_way);
                self.held.hold(gathered, tile.values);
                self.held.free(gathered, tile.joined);
                if let Some(next) = tiles.get(index + 1).filter(|_| overlap) {
                    self.held.hold(gathered, next.on_the_way);
                }
                self.held.free(gathered, tile.values);
            }
        }
    }
}

fn waiting_for(lane: Lane, unit: Unit, block: usize) -> WaitingFor {
    WaitingFor {
        lane,
        micro_batch: unit.micro_batch,
        block,
    }
}
