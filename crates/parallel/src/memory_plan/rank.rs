//! A rank that goes through its steps without values.

use std::collections::{BTreeMap, VecDeque};

use candle_core::{DType, Result, bail};
use candle_ops::quantized_bytes;

use super::held::{Held, Moment};
use super::planned_store::{PlannedStore, PlannedSums};
use super::{PlannedPasses, PlannedUpdate, PlannedWork};
use crate::memory::MemoryCategory;
use crate::offload::OffloadPlace;
use crate::optimizer::{BucketShape, StateSlices, max_gathers, num_bytes_of};
use crate::params::{Bucket, RankSpec, ReduceType, ReplicaGroups, Sharing, is_adopted};
use crate::placement::{intersect, part};
use crate::schedule::{Instruction, Plan};

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
    held: Held,
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
        let mut held = Held::default();
        let slices = spec.layout.all();
        let slices = slices.map(|bucket| bytes(bucket) / groups.shard.world_size());
        let slices: Vec<usize> = slices.collect();
        let resident = match (groups.offloads_weights, groups.shards_weights()) {
            (true, _) => 0,
            (false, true) => slices.iter().sum(),
            (false, false) => spec.params.iter().map(|param| param.num_bytes()).sum(),
        };
        held.hold(MemoryCategory::Weights, resident);
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
        Ok(Self {
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
        let trained = blocks.start.max(self.num_frozen)..blocks.end;
        match instruction {
            Instruction::Forward(_) => {
                for block in blocks.clone() {
                    let tape = match self.trains && block >= self.num_frozen {
                        true => passes.kept_bytes(block),
                        false => 0,
                    };
                    if block == head {
                        self.held.hold(activations, tape);
                        continue;
                    }
                    let next = Some(block + 1).filter(|next| blocks.contains(next));
                    // In training the weights of the head are needed in the backward pass alone.
                    let next = next.filter(|&next| next != head || !self.trains).or(after);
                    self.run(block, next, |rank| rank.held.hold(activations, tape));
                }
                if self.trains && blocks.end <= head {
                    let output = passes.input_bytes(blocks.end);
                    self.held.hold(activations, output);
                    self.held.free(activations, output);
                }
            }
            Instruction::Backward(_) | Instruction::InputGrad(_) => {
                let is_whole = matches!(instruction, Instruction::Backward(_));
                for block in trained.clone().rev() {
                    let next = block.checked_sub(1).filter(|next| trained.contains(next));
                    self.run(block, next.or(after), |rank| {
                        if is_whole {
                            rank.write_gradients(block);
                        }
                    });
                    self.held.free(activations, passes.kept_bytes(block));
                    match is_whole {
                        true => self.block_done(block),
                        false => {
                            let waiting = self.waiting_bytes(passes, block);
                            self.held.hold(activations, waiting);
                        }
                    }
                    // The gradient for the block before it.
                    if block > self.num_frozen {
                        let grad = passes.input_bytes(block);
                        self.held.hold(activations, grad);
                        self.held.free(activations, grad);
                    }
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

    /// What waits for the weight half of a block.
    fn waiting_bytes(&self, passes: &PlannedPasses<'_>, block: usize) -> usize {
        let early = passes.plan.early(self.groups.shards_gradients());
        passes.waiting_bytes(block, early.large, !self.groups.shards_weights())
    }

    /// Does `pass` with the weights of a block in place; meanwhile those of `next` come.
    fn run(&mut self, block: usize, next: Option<usize>, pass: impl FnOnce(&mut Self)) {
        self.wait_while(|first| first <= block);
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

    fn needed(&self, block: usize) -> Vec<usize> {
        self.needed.get(&block).cloned().unwrap_or_default()
    }

    fn bucket(&self, index: usize) -> &'a Bucket {
        let layout = &self.spec.layout;
        match index.checked_sub(layout.buckets.len()) {
            None => &layout.buckets[index],
            Some(frozen) => &layout.frozen[frozen],
        }
    }

    /// Whether the weights of a bucket are gathered in 8 bits.
    fn is_quantized(&self, bucket: &Bucket) -> bool {
        let moves = self.groups.shard.world_size() > 1 && self.groups.config.quantize_weights;
        moves && bucket.sharing == Sharing::None && bucket.dtype != DType::U8
    }

    fn prefetch(&mut self, block: usize) {
        for index in self.needed(block) {
            let (bucket, gathered) = (self.bucket(index), self.gathered[index]);
            if gathered.on_the_way + gathered.present > 0 {
                continue;
            }
            let bytes = match (self.has_copy[index], self.groups.offloads_weights) {
                (true, _) => bytes(bucket),
                (false, true) => bytes(bucket) / self.groups.shard.world_size(),
                (false, false) => self.moved_bytes(bucket),
            };
            self.gathered[index].on_the_way = bytes;
            self.held.hold(MemoryCategory::Gathered, bytes);
        }
    }

    /// What ranks send of a bucket of weights, and what comes of it.
    fn moved_bytes(&self, bucket: &Bucket) -> usize {
        let num_slices = self.groups.shard.world_size();
        match self.is_quantized(bucket) {
            // And the copy that is sent.
            true => (num_slices + 1) * quantized_bytes(bucket.len / num_slices),
            false => bytes(bucket),
        }
    }

    /// Gives the parameters of a bucket their values.
    fn arrive(&mut self, index: usize) {
        let mut on_the_way = std::mem::take(&mut self.gathered[index].on_the_way);
        if on_the_way == 0 {
            return;
        }
        let bucket = self.bucket(index);
        let is_divided = self.groups.shard.world_size() > 1;
        if self.groups.offloads_weights && is_divided && !self.has_copy[index] {
            // The slice has come, and is gathered.
            let moved = self.moved_bytes(bucket);
            self.held.hold(MemoryCategory::Gathered, moved);
            self.held.free(MemoryCategory::Gathered, on_the_way);
            on_the_way = moved;
        }
        if let Some(secondary) = &self.groups.secondary
            && !std::mem::replace(&mut self.has_copy[index], true)
        {
            let part = bytes(bucket) / secondary.world_size();
            self.held.hold(MemoryCategory::Gathered, part);
        }
        let of_slots = bucket.slots.iter();
        let of_slots = of_slots.map(|slot| self.spec.params[slot.param].num_bytes());
        let (all, whole): (Vec<usize>, usize) = (of_slots.collect(), bytes(bucket));
        let others: usize = all.iter().skip(1).sum();
        let adopts = is_adopted(others, whole);
        let copied = if adopts { others } else { all.iter().sum() };
        self.held.free(MemoryCategory::Gathered, on_the_way);
        self.held.hold(MemoryCategory::Gathered, whole + copied);
        if !adopts {
            self.held.free(MemoryCategory::Gathered, whole);
        }
        self.gathered[index].present = if adopts { whole + copied } else { copied };
    }

    fn free_bucket(&mut self, index: usize) {
        let Gathered {
            on_the_way,
            present,
        } = std::mem::take(&mut self.gathered[index]);
        self.held
            .free(MemoryCategory::Gathered, on_the_way + present);
    }

    fn free_gathered(&mut self) {
        for index in 0..self.gathered.len() {
            self.free_bucket(index);
            if let Some(secondary) = &self.groups.secondary
                && std::mem::take(&mut self.has_copy[index])
            {
                let part = bytes(self.bucket(index)) / secondary.world_size();
                self.held.free(MemoryCategory::Gathered, part);
            }
        }
    }

    /// The weights of a block that come tile by tile.
    fn use_tiles(&mut self, block: usize) {
        let spec = self.spec;
        if !self.groups.shards_weights() {
            return;
        }
        for bucket in spec.layout.all().filter(|bucket| bucket.is_tiled) {
            let is_quantized = self.is_quantized(bucket);
            for slot in &bucket.slots {
                let param = &spec.params[slot.param];
                if !param.blocks.contains(&block) {
                    continue;
                }
                let num_rows = param.shape.first().copied().unwrap_or(1);
                let num_tiles = self.groups.config.tile_linears.min(num_rows).max(1);
                let width = slot.range.len() / num_rows.max(1);
                let tile = |index| {
                    let rows = part(num_rows, index, num_tiles);
                    let start = slot.range.start;
                    self.tile(
                        bucket,
                        &(start + rows.start * width..start + rows.end * width),
                        is_quantized,
                    )
                };
                let tiles: Vec<Tile> = (0..num_tiles).map(tile).collect();
                self.go_through(&tiles);
            }
        }
    }

    /// Some values of a bucket that are gathered together.
    fn tile(&self, bucket: &Bucket, range: &std::ops::Range<usize>, is_quantized: bool) -> Tile {
        let slices = self.groups.slices(bucket.len).into_iter().enumerate();
        let pieces = slices.map(|(rank, slice)| (rank, intersect(range, &slice).len()));
        let pieces: Vec<_> = pieces.filter(|(_, len)| *len > 0).collect();
        let received = pieces.iter();
        let received = received.filter(|(rank, _)| *rank != self.groups.shard.rank());
        let received = received.map(|(_, len)| match is_quantized {
            true => quantized_bytes(*len),
            false => len * bucket.dtype.size_in_bytes(),
        });
        let values = range.len() * bucket.dtype.size_in_bytes();
        Tile {
            values,
            on_the_way: values + received.sum::<usize>(),
            joined: if pieces.len() > 1 { values } else { 0 },
        }
    }

    fn go_through(&mut self, tiles: &[Tile]) {
        let (gathered, overlap) = (MemoryCategory::Gathered, self.groups.config.overlap);
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

    fn gradient_bytes(&self, index: usize) -> usize {
        GRADIENT_BYTES * self.spec.layout.gradient_bucket(index).len
    }

    /// What moves of a bucket of gradients if that is not itself, and what comes of it.
    fn copy_bytes(&self, index: usize) -> usize {
        let bucket = self.spec.layout.gradient_bucket(index);
        let num_slices = self.groups.shard.world_size();
        match self.groups.reduce_type(bucket) {
            ReduceType::F32 => 0,
            ReduceType::Bf16 => {
                DType::BF16.size_in_bytes() * (bucket.len + bucket.len / num_slices)
            }
            ReduceType::Int8 => 2 * num_slices * quantized_bytes(bucket.len / num_slices),
        }
    }

    /// A block writes to its gradients.
    fn write_gradients(&mut self, block: usize) {
        let layout = &self.spec.layout;
        for index in 0..layout.num_gradient_buckets() {
            if layout.gradient_bucket(index).blocks.contains(&block) {
                self.take_whole(index);
            }
        }
    }

    /// A bucket is to be whole, which it always is unless it is divided or away.
    fn take_whole(&mut self, index: usize) {
        let bytes = self.gradient_bytes(index);
        self.is_settled[index] = false;
        match (self.groups.shards_gradients(), &self.sums) {
            (false, None) => {}
            _ if std::mem::replace(&mut self.is_whole[index], true) => {}
            (true, _) => self.held.hold(MemoryCategory::Buffers, bytes),
            (false, Some(_)) => self.take_sum(index),
        }
    }

    fn block_done(&mut self, block: usize) {
        let layout = &self.spec.layout;
        if let Some(owed) = self.owed.get_mut(&block) {
            *owed = owed.saturating_sub(1);
        }
        if self.groups.shards_gradients() {
            for index in 0..layout.num_gradient_buckets() {
                if layout.gradient_bucket(index).blocks.first() == Some(&block) {
                    self.divide(index);
                }
            }
            return;
        }
        let overlaps = self.groups.config.overlap && self.spec.num_replicas > 1;
        for (index, bucket) in layout.buckets.iter().enumerate().filter(|_| overlaps) {
            if bucket.tie.is_some() {
                continue;
            }
            if !self.is_complete(bucket) {
                break;
            }
            self.start_sum(index);
            for earlier in 0..index {
                if self.sums.is_some() && self.is_summed[earlier] {
                    self.settle(earlier);
                }
            }
        }
        for index in 0..layout.num_gradient_buckets() {
            let is_last = layout.gradient_bucket(index).blocks.first() == Some(&block);
            if is_last && !self.is_summed[index] && std::mem::take(&mut self.is_whole[index]) {
                self.note_squares(index);
                self.put(index);
            }
        }
    }

    fn is_complete(&self, bucket: &Bucket) -> bool {
        let is_owed = |block: &usize| self.owed.get(block).is_none_or(|owed| *owed > 0);
        !bucket.blocks.iter().any(is_owed)
    }

    /// A sum that is away comes.
    fn take_sum(&mut self, index: usize) {
        if let Some(sums) = &mut self.sums {
            sums.take(index, &mut self.held);
        }
    }

    /// It goes back.
    fn put(&mut self, index: usize) {
        if let Some(sums) = &mut self.sums {
            sums.put(index);
        }
    }

    /// What no other rank adds to need not come back to be summed.
    fn note_squares(&mut self, index: usize) {
        let Some(bucket) = self.spec.layout.buckets.get(index) else {
            return;
        };
        let num_ranks = match self.groups.shards_gradients() {
            true => self.groups.replicate.world_size(),
            false => self.spec.num_replicas,
        };
        let is_own = bucket.sharing == Sharing::None && bucket.tie.is_none();
        if is_own && num_ranks == 1 && self.is_complete(bucket) {
            self.is_settled[index] = true;
        }
    }

    /// Starts to sum a micro-batch's gradients of a bucket over the ranks that divide it.
    fn divide(&mut self, index: usize) {
        if !std::mem::take(&mut self.is_whole[index]) {
            return;
        }
        self.held
            .hold(MemoryCategory::Buffers, self.copy_bytes(index));
        self.dividing.push_back(index);
        self.finish_dividing(usize::from(self.groups.config.overlap));
    }

    fn finish_dividing(&mut self, num_left: usize) {
        while self.dividing.len() > num_left {
            let Some(index) = self.dividing.pop_front() else {
                return;
            };
            self.held
                .free(MemoryCategory::Buffers, self.copy_bytes(index));
            self.take_sum(index);
            self.held
                .free(MemoryCategory::Buffers, self.gradient_bytes(index));
            if self.sums.is_some() && !self.dividing.contains(&index) {
                self.note_squares(index);
            }
            self.put(index);
        }
    }

    fn start_sum(&mut self, index: usize) {
        if !self.is_settled[index] && !std::mem::replace(&mut self.is_summed[index], true) {
            self.take_whole(index);
            let bytes = self.copy_bytes(index);
            self.held.hold(MemoryCategory::Buffers, bytes);
        }
    }

    /// The sums after the passes: two buckets are under way at a time.
    fn reduce(&mut self) {
        let layout = &self.spec.layout;
        if self.groups.shards_gradients() {
            self.finish_sums();
            (0..layout.num_gradient_buckets()).for_each(|index| self.divide(index));
            self.finish_dividing(0);
        }
        for index in 0..=layout.buckets.len() {
            for stage in layout.stages_of(index) {
                if !self.groups.shards_gradients() {
                    self.start_sum(stage);
                }
            }
            if let Some(earlier) = index.checked_sub(1) {
                self.settle(earlier);
            }
        }
        self.finish_sums();
        if let Some(PlannedSums { store: sums, .. }) = &self.sums {
            // Copies are compared together.
            let buckets = layout.buckets.iter().enumerate();
            let copies = buckets.filter(|(_, bucket)| bucket.sharing == Sharing::Copies);
            let copies: Vec<usize> = copies.map(|(index, _)| index).collect();
            for &index in &copies {
                sums.take(index, &mut self.held);
            }
            for &index in &copies {
                sums.release(index, &mut self.held);
            }
        }
        self.is_settled.fill(false);
    }

    fn finish_sums(&mut self) {
        if let Some(sums) = &mut self.sums {
            sums.finish(&mut self.held);
        }
    }

    /// The sum of a bucket ends.
    fn settle(&mut self, index: usize) {
        if std::mem::replace(&mut self.is_settled[index], true) {
            return;
        }
        let is_divided = self.groups.shards_gradients();
        for stage in self.spec.layout.stages_of(index) {
            if std::mem::take(&mut self.is_summed[stage]) {
                let bytes = self.copy_bytes(stage);
                self.held.free(MemoryCategory::Buffers, bytes);
            }
            if is_divided {
                self.take_sum(stage);
            }
        }
        for stage in self.spec.layout.stages_of(index) {
            self.is_whole[stage] = false;
            match &self.sums {
                Some(sums) if stage != index => sums.store.release(stage, &mut self.held),
                _ => self.put(stage),
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

    fn wait_while(&mut self, is_needed: impl Fn(usize) -> bool) {
        while (self.pending.front()).is_some_and(|(first, _)| is_needed(*first)) {
            self.take_pending();
        }
    }

    fn take_pending(&mut self) {
        if let Some((_, bytes)) = self.pending.pop_front() {
            self.held.free(MemoryCategory::Buffers, bytes);
        }
    }
}

/// Bytes of a tile: in use, on its way, and joined of what several ranks sent.
struct Tile {
    values: usize,
    on_the_way: usize,
    joined: usize,
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
