//! A rank that goes through its steps without values.

mod gathered;
mod sums;

use std::collections::{BTreeMap, VecDeque};

use candle_core::{DType, Result, bail};

use super::held::{Moment, PlannedBytes};
use super::planned_store::{PlannedStore, PlannedSums, PlannedWaiting, WaitingFor};
use super::{PlannedPasses, PlannedUpdate, PlannedWork};
use crate::memory::MemoryCategory;
use crate::offload::{Lane, OffloadPlace};
use crate::optimizer::{BucketShape, StateSlices, max_gathers, num_bytes_of};
use crate::params::{Bucket, HeldParam, RankSpec, ReplicaGroups, packed_bytes};
use crate::pass::Recompute;
use crate::schedule::{Instruction, Message, Plan, Unit};

/// Of a gradient.
const GRADIENT_BYTES: usize = 4;

/// The rank: what the parts of `gradients`, `optimizer` and `params` that run hold, in the same order.
pub(super) struct PlannedRank<'a> {
    spec: &'a RankSpec,
    groups: ReplicaGroups,
    passes: Option<PlannedPasses<'a>>,
    /// What the rank computes in a step.
    list: Vec<Instruction>,
    trains: bool,
    updates: bool,
    /// The optimizer's state, sums of gradients, and the weights, if they are not on the device.
    state: Option<(PlannedStore, StateSlices)>,
    sums: Option<PlannedSums>,
    weights: Option<PlannedStore>,
    /// Activations, if they are away between passes.
    waiting: Option<PlannedWaiting>,
    held: PlannedBytes,
    /// Blocks before the first one that is trained, if the first stage is here.
    num_frozen: usize,
    /// Of each block the buckets that are gathered for it, among all.
    needed: BTreeMap<usize, Vec<usize>>,
    /// Of each bucket of weights that replicas divide what is gathered of it.
    gathered: Vec<Gathered>,
    /// Of each, whether this rank has its part of a second copy.
    has_copy: Vec<bool>,
    /// Whether a bucket of gradients that replicas divide, or that is away, exists whole.
    is_whole: Vec<bool>,
    /// Divided buckets that are being summed.
    dividing: VecDeque<usize>,
    /// Whether the sum of a bucket has started.
    is_summed: Vec<bool>,
    /// Whether it is over, and nothing is left to be known of it.
    is_settled: Vec<bool>,
    /// Of each block how many micro-batches it owes.
    owed: BTreeMap<usize, usize>,
    /// Updated weights on their way: the first block that uses them, and bytes.
    pending: VecDeque<(usize, usize)>,
}

/// Bytes that are gathered of a bucket.
#[derive(Clone, Copy, Default)]
struct Gathered {
    on_the_way: usize,
    present: usize,
}

impl<'a> PlannedRank<'a> {
    pub fn new(spec: &'a RankSpec, work: &PlannedWork<'a>) -> Result<Self> {
        // Whichever folder a rank has.
        let place = work.offload.place_of_params(0, work.on_gpu);
        let groups = ReplicaGroups::unconnected(
            work.replicas,
            place != OffloadPlace::Device,
            spec.replica,
            spec.num_replicas,
        )?;
        let mut list = Vec::new();
        if let Some(passes) = &work.passes {
            check_stages(spec, passes.plan)?;
            list = passes.plan.joined(spec.pp_rank);
        }
        let trains = list.iter().any(|instruction| {
            matches!(
                instruction,
                Instruction::Backward(_) | Instruction::InputGrad(_)
            )
        });
        if let Some(passes) = work.passes.as_ref().filter(|_| trains) {
            passes.check()?;
        }
        let mut held = PlannedBytes::default();
        let slices = spec.layout.all();
        let slices = slices.map(|bucket| bytes(bucket) / groups.shard.world_size());
        let slices: Vec<usize> = slices.collect();
        let packs = !groups.shards_weights() && !groups.offloads_weights && !work.on_gpu;
        let stays_packed = |param: &&HeldParam| {
            let is_used = work.passes.is_some() && (trains || !param.trainable);
            let is_packed = param.is_multiplied && work.pack_weights.includes(param.trainable);
            packs && is_packed && is_used
        };
        let resident = match (groups.offloads_weights, groups.shards_weights()) {
            (true, _) => 0,
            (false, true) => slices.iter().sum(),
            (false, false) => spec.params.iter().map(HeldParam::num_bytes).sum(),
        };
        held.hold(MemoryCategory::Weights, resident);
        let packed = spec.params.iter().filter(stays_packed);
        let packed = packed.map(|param| packed_bytes(&param.shape, param.dtype));
        held.hold(MemoryCategory::Packed, packed.sum());
        let weights = PlannedStore::new(place, MemoryCategory::Gathered, slices, &mut held);
        let mut sums = None;
        if trains {
            let gradients = spec.layout.of_gradients().map(|bucket| {
                let len = match groups.shards_gradients() {
                    true => groups.own_range(bucket.len).len(),
                    false => bucket.len,
                };
                GRADIENT_BYTES * len
            });
            let gradients: Vec<usize> = gradients.collect();
            let of_all = gradients.iter().sum();
            let place = work.offload.place_of_gradients(0, work.on_gpu);
            let store = PlannedStore::new(place, MemoryCategory::Gradients, gradients, &mut held);
            let blocks = spec.layout.of_gradients().map(|bucket| bucket.block);
            sums = store.map(|store| PlannedSums::new(store, blocks.collect()));
            if sums.is_none() {
                held.hold(MemoryCategory::Gradients, of_all);
            }
        }
        let mut state = None;
        if let Some(update) = &work.update {
            let shapes = state_shapes(spec, &groups, update)?;
            let slices = StateSlices::new(&shapes, work.offload.update_values);
            let bytes = slices.items(&shapes).into_iter().map(num_bytes_of);
            let bytes: Vec<usize> = bytes.collect();
            let place = work.offload.place_of_optimizer(0, work.on_gpu);
            let of_all = bytes.iter().sum();
            let store = PlannedStore::new(place, MemoryCategory::Optimizer, bytes, &mut held);
            if store.is_none() {
                held.hold(MemoryCategory::Optimizer, of_all);
            }
            state = store.map(|store| (store, slices));
        }
        let mut needed: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (index, bucket) in spec
            .layout
            .all()
            .enumerate()
            .filter(|_| groups.shards_weights())
        {
            let slots = bucket.slots.iter().filter(|_| !bucket.is_tiled);
            for &block in slots.flat_map(|slot| &spec.params[slot.param].blocks) {
                let of_block = needed.entry(block).or_default();
                if !of_block.contains(&index) {
                    of_block.push(index);
                }
            }
        }
        let num_gradients = spec.layout.num_gradient_buckets();
        let waiting = work.offload.place_of_activations(0, work.on_gpu);
        Ok(Self {
            waiting: PlannedWaiting::new(waiting, work.offload.kept_activations),
            num_frozen: num_frozen(spec, work.passes.as_ref()),
            updates: work.update.is_some(),
            state,
            sums,
            weights,
            gathered: vec![Gathered::default(); spec.num_buckets()],
            has_copy: vec![false; spec.num_buckets()],
            is_whole: vec![false; num_gradients],
            dividing: VecDeque::new(),
            is_summed: vec![false; num_gradients],
            is_settled: vec![false; num_gradients],
            owed: BTreeMap::new(),
            pending: VecDeque::new(),
            passes: work.passes,
            spec,
            groups,
            list,
            trains,
            held,
            needed,
        })
    }

    /// A step, of which each instruction is a moment.
    pub fn step(&mut self) -> Result<Vec<Moment>> {
        let mut moments = vec![];
        if let Some(passes) = self.passes {
            let layout = passes.plan.layout();
            let blocks = layout
                .stages_of(self.spec.pp_rank)
                .flat_map(|stage| layout.blocks(stage));
            let num_micro_batches = passes.plan.num_micro_batches();
            self.owed = blocks.map(|block| (block, num_micro_batches)).collect();
            if self.trains {
                self.free_gathered();
            }
            let list = std::mem::take(&mut self.list);
            for (place, &instruction) in list.iter().enumerate() {
                let after = list[place + 1..].iter();
                let after = after
                    .filter_map(|next| self.first_block(&passes, *next))
                    .next();
                self.instruction(&passes, instruction, after);
                moments.push(self.held.moment(Some(instruction)));
            }
            self.list = list;
            let head = layout.num_blocks() - 1;
            if !self.trains && self.owed.contains_key(&head) {
                for _ in 0..num_micro_batches {
                    self.run(head, None, |_| {});
                }
            }
        }
        if self.trains {
            self.reduce();
        }
        if self.updates {
            self.update();
        }
        moments.push(self.held.moment(None));
        Ok(moments)
    }

    /// The first block whose weights an instruction needs.
    fn first_block(&self, passes: &PlannedPasses<'_>, instruction: Instruction) -> Option<usize> {
        let layout = passes.plan.layout();
        let mut blocks = layout.blocks(instruction.unit().stage);
        let head = layout.num_blocks() - 1;
        match instruction {
            Instruction::Forward(_) => blocks.next().filter(|&block| block != head),
            Instruction::Backward(_) | Instruction::InputGrad(_) => {
                blocks.rfind(|&block| block >= self.num_frozen)
            }
            _ => None,
        }
    }

    /// `after` is the block that the rank runs next.
    fn instruction(
        &mut self,
        passes: &PlannedPasses<'_>,
        instruction: Instruction,
        after: Option<usize>,
    ) {
        let layout = passes.plan.layout();
        let (blocks, head) = (
            layout.blocks(instruction.unit().stage),
            layout.num_blocks() - 1,
        );
        let activations = MemoryCategory::Activations;
        let micro_batch = instruction.unit().micro_batch;
        let activation = |block| WaitingFor {
            lane: Lane::Activations,
            micro_batch,
            block,
        };
        let gradient = |block| WaitingFor {
            lane: Lane::Gradients,
            ..activation(block)
        };
        let trained = blocks.start.max(self.num_frozen)..blocks.end;
        match instruction {
            Instruction::Forward(unit) => {
                // What the stage before on this rank gave.
                let mut given = self.comes_back(passes, unit, Message::Activation);
                for block in blocks.clone() {
                    let given = std::mem::take(&mut given);
                    let is_kept = self.trains && block >= self.num_frozen;
                    let waits = is_kept && self.waits(passes, block);
                    let input = passes.input_bytes(block);
                    let tape = match is_kept && !waits {
                        true => passes.kept_bytes(block),
                        false => 0,
                    };
                    match (given, waits) {
                        (true, false) => self.take_waiting(activation(block), input),
                        (false, true) => self.put_waiting(activation(block), input),
                        _ => {}
                    }
                    if block == head {
                        self.held.hold(activations, tape);
                        continue;
                    }
                    let next = Some(block + 1).filter(|next| blocks.contains(next));
                    // In training the weights of the head are needed in the backward pass alone.
                    let next = next.filter(|&next| next != head || !self.trains).or(after);
                    self.run(block, next, |rank| rank.held.hold(activations, tape));
                    if waits {
                        // What the block has given is here beside those that wait.
                        let output = passes.input_bytes(block + 1);
                        self.held.hold(activations, output);
                        self.held.free(activations, output);
                    }
                }
                if self.trains && blocks.end <= head {
                    let output = passes.input_bytes(blocks.end);
                    self.held.hold(activations, output);
                    self.held.free(activations, output);
                }
                if blocks.end <= head && self.is_given_here(passes, unit.stage + 1, unit.stage) {
                    self.put_waiting(activation(blocks.end), passes.input_bytes(blocks.end));
                }
            }
            Instruction::Backward(unit) | Instruction::InputGrad(unit) => {
                let is_whole = matches!(instruction, Instruction::Backward(_));
                if self.comes_back(passes, unit, Message::Gradient) {
                    self.take_waiting(gradient(blocks.end), passes.input_bytes(blocks.end));
                }
                for block in trained.clone().rev() {
                    let next = block.checked_sub(1).filter(|next| trained.contains(next));
                    self.run(block, next.or(after), |rank| {
                        let early = passes.plan.early(rank.gradients_come_once());
                        // None of the gradients of what is computed again waits.
                        let is_again = passes.recompute_of(block) == Recompute::Full;
                        if is_whole || early.large && is_again {
                            rank.write_gradients(block);
                        }
                    });
                    match self.waits(passes, block) {
                        true => self.take_waiting(activation(block), passes.input_bytes(block)),
                        false => self.held.free(activations, passes.kept_bytes(block)),
                    }
                    match is_whole {
                        true => self.block_done(block),
                        false => {
                            let waiting = self.waiting_bytes(passes, block);
                            self.held.hold(activations, waiting);
                        }
                    }
                    // The gradient for the block before it.
                    if block > self.num_frozen || unit.stage > 0 {
                        let grad = passes.input_bytes(block);
                        self.held.hold(activations, grad);
                        self.held.free(activations, grad);
                    }
                }
                // Also to a stage that is frozen: this one does not know it.
                if unit.stage > 0 && self.is_given_here(passes, unit.stage - 1, unit.stage) {
                    self.put_waiting(gradient(blocks.start), passes.input_bytes(blocks.start));
                }
            }
            Instruction::WeightGrad(_) => {
                for block in trained.rev() {
                    self.write_gradients(block);
                    self.block_done(block);
                    let waiting = self.waiting_bytes(passes, block);
                    self.held.free(activations, waiting);
                }
            }
            Instruction::Send(..) | Instruction::Recv(..) => {}
        }
    }

    /// Whether what the tape keeps of a block is its input, away until the backward pass.
    fn waits(&self, passes: &PlannedPasses<'_>, block: usize) -> bool {
        let is_head = block + 1 == passes.plan.layout().num_blocks();
        // The first block of a model gets tokens, which stay.
        let is_input = is_head || passes.recompute_of(block) == Recompute::Full;
        self.waiting.is_some() && is_input && block > 0
    }

    /// Whether two stages are on this rank, and what one gives the other is away until that takes it.
    fn is_given_here(&self, passes: &PlannedPasses<'_>, to: usize, from: usize) -> bool {
        let layout = passes.plan.layout();
        self.waiting.is_some() && layout.rank_of(to) == layout.rank_of(from)
    }

    /// Whether what a unit gets waits away from the device of this rank.
    fn comes_back(&self, passes: &PlannedPasses<'_>, unit: Unit, what: Message) -> bool {
        let giving = match what {
            Message::Activation => unit.stage.checked_sub(1),
            Message::Gradient => {
                Some(unit.stage + 1).filter(|&stage| stage < passes.plan.layout().num_stages())
            }
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

    fn gradients_come_once(&self) -> bool {
        self.groups.shards_gradients() || self.sums.is_some()
    }

    /// What waits for the weight half of a block.
    fn waiting_bytes(&self, passes: &PlannedPasses<'_>, block: usize) -> usize {
        let early = passes.plan.early(self.gradients_come_once());
        passes.waiting_bytes(block, early.large, !self.groups.shards_weights())
    }

    /// Does `pass` with the weights of a block in place; meanwhile those of `next` come.
    fn run(&mut self, block: usize, next: Option<usize>, pass: impl FnOnce(&mut Self)) {
        while (self.pending.front()).is_some_and(|(first, _)| *first <= block) {
            self.take_pending();
        }
        self.prefetch(block);
        for index in self.needed(block) {
            self.arrive(index);
        }
        if let Some(next) = next.filter(|_| self.groups.config.overlap) {
            self.prefetch(next);
        }
        self.use_tiles(block);
        pass(self);
        let kept = next.map(|next| self.needed(next)).unwrap_or_default();
        for index in self.needed(block) {
            if !kept.contains(&index) {
                self.free_bucket(index);
            }
        }
    }

    fn update(&mut self) {
        self.wait_for_all_but(0);
        self.free_gathered();
        let gathers = self.groups.shard.world_size() > 1 && !self.groups.shards_weights();
        let max_gathers = max_gathers(&self.groups);
        let order = self.spec.layout.in_forward_order();
        for (place, &index) in order.iter().enumerate() {
            let (bucket, next) = (
                &self.spec.layout.buckets[index],
                order.get(place + 1).copied(),
            );
            let sums = self.sums.as_mut().map(|sums| &mut sums.store);
            for store in sums.into_iter().chain(&mut self.weights) {
                store.begin(index, next, &mut self.held);
            }
            if let Some((state, slices)) = &mut self.state {
                for (item, next, _) in slices.of(index, next) {
                    state.begin(item, next, &mut self.held);
                    state.end(item, &mut self.held);
                }
            }
            if let Some(sums) = &self.sums {
                sums.store.release(index, &mut self.held);
            }
            if let Some(weights) = &mut self.weights {
                weights.end(index, &mut self.held);
            }
            if gathers {
                self.wait_for_all_but(max_gathers.saturating_sub(1));
                // Weights in f32 pass through the buffer of the gradients, if that is there.
                let is_here = self.sums.is_none() && !self.groups.shards_gradients();
                let has_buffer = self.trains && is_here;
                let bytes = match has_buffer && bucket.dtype == DType::F32 {
                    true => 0,
                    false => bytes(bucket),
                };
                self.held.hold(MemoryCategory::Buffers, bytes);
                self.pending.push_back((bucket.block, bytes));
            }
            self.wait_for_all_but(max_gathers);
        }
        let state = self.state.as_mut().map(|(state, _)| state);
        for store in state.into_iter().chain(&mut self.weights) {
            store.finish(&mut self.held);
        }
    }

    fn wait_for_all_but(&mut self, num_left: usize) {
        while self.pending.len() > num_left {
            self.take_pending();
        }
    }

    fn take_pending(&mut self) {
        if let Some((_, bytes)) = self.pending.pop_front() {
            self.held.free(MemoryCategory::Buffers, bytes);
        }
    }
}

fn bytes(bucket: &Bucket) -> usize {
    bucket.len * bucket.dtype.size_in_bytes()
}

/// An error unless the model's stages on this rank are those of the plan.
fn check_stages(spec: &RankSpec, plan: &Plan) -> Result<()> {
    let layout = plan.layout();
    let planned = layout.stages_of(spec.pp_rank);
    let planned: Vec<_> = planned.map(|stage| layout.blocks(stage)).collect();
    if planned != spec.stages || spec.pp_rank >= plan.ranks().len() {
        bail!(
            "the plan has the blocks {planned:?} on rank {} of the pipeline; expected those of the model there, {:?}",
            spec.pp_rank,
            spec.stages
        );
    }
    Ok(())
}

/// Blocks before the first one with a trainable parameter, if the rank has the first stage: no gradient needs to reach them.
fn num_frozen(spec: &RankSpec, passes: Option<&PlannedPasses<'_>>) -> usize {
    let Some(layout) = passes.map(|passes| passes.plan.layout()) else {
        return 0;
    };
    if layout.rank_of(0) != spec.pp_rank {
        return 0;
    }
    let is_trained = |block: &usize| {
        let mut params = spec.params.iter();
        params.any(|param| param.trainable && param.blocks.contains(block))
    };
    let first = layout.blocks(0);
    first.clone().find(is_trained).unwrap_or(first.end)
}

/// State and masters of each bucket.
fn state_shapes(
    spec: &RankSpec,
    groups: &ReplicaGroups,
    update: &PlannedUpdate<'_>,
) -> Result<Vec<BucketShape>> {
    let buckets = spec.layout.buckets.iter();
    let shapes = buckets.map(|bucket| {
        let len = groups.own_range(bucket.len).len();
        let first = bucket.slots.first();
        let name = first.map_or("", |slot| spec.params[slot.param].name.as_str());
        BucketShape::of_rule(update.rule, len, bucket.dtype, name)
    });
    shapes.collect()
}
