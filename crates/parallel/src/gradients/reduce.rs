//! The reduction of gradients over the ranks of the mesh, bucket by bucket, under the backward pass.
//!
//! The order in which a rank starts reductions follows from the layout alone: blocks from the last to the first as their
//! backward passes end, then parameters tied across stages, when all passes are over. Whether reductions overlap with the
//! backward pass changes when they start, not their order, and so no bit.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use candle_comm::ReduceOp;
use candle_core::{DType, Result, Tensor, bail};

use super::accumulate::Gradients;
use super::alike::{OfRank, reported_unlike};
use super::reduced::{ReducedBuckets, ReducedGradients, ReducedLoss, UpdateNotice};
use super::shared::sum_shared_ranges;
use super::squares::Squares;
use super::transfer::Sum;
use crate::agreement::gather;
use crate::memory::MemoryCategory;
use crate::params::{Bucket, FlatBuffer, Parameters, Sharing, Slot};
use crate::pass::{PipelineRank, Reported};

/// Reductions under way.
pub(super) struct Reductions {
    /// Of whole buckets, one after the last micro-batch.
    started: Vec<Option<Sum>>,
    /// Of divided buckets, one after each micro-batch.
    dividing: VecDeque<(usize, Sum)>,
    /// Whether the slice of a divided bucket holds the sum of some micro-batches.
    has_sum: Vec<bool>,
    /// Of whole buckets this rank's part of what earlier passes of the step gave, if it was summed before they went on.
    earlier: Vec<Option<FlatBuffer>>,
    /// Of each block how many micro-batches it has not computed the gradients of its weights for.
    owed: HashMap<usize, usize>,
    /// Of each bucket whether its sum is over all ranks and micro-batches, away, with its squares known.
    pub(super) is_settled: Vec<bool>,
    /// Those of which that is a sum over replicas, to which nothing can be added any more.
    is_reduced: Vec<bool>,
    /// Of settled buckets.
    squares: Option<Squares>,
    /// Of each parameter that several tensor-parallel ranks hold, whether the ranks' gradients were seen to be summands.
    is_summand: Vec<bool>,
}

/// Steps in which tensor-parallel ranks compare what passes between blocks: more than one, as a weight that begins as zeros hides what is
/// behind it, and a product of two such weights does so twice.
pub(super) const NUM_COMPARED: usize = 3;

/// Numbers that a step sums over all ranks.
pub(super) const NUM_SUMS: usize = 8;

/// Numbers of each rank of a pipeline that come with them.
const NUM_OF_RANK: usize = 3;

/// Buckets that are whole on this rank while they are summed, at most, if they are divided or away; one more is being written to. One that
/// several blocks write to is whole from the first write until the backward pass of its first block.
const MAX_DIVIDING: usize = 1;

impl Reductions {
    pub fn new(num_buckets: usize, num_params: usize) -> Self {
        Self {
            started: (0..num_buckets).map(|_| None).collect(),
            dividing: VecDeque::new(),
            has_sum: vec![false; num_buckets],
            earlier: vec![None; num_buckets],
            owed: HashMap::new(),
            is_settled: vec![false; num_buckets],
            is_reduced: vec![false; num_buckets],
            squares: None,
            is_summand: vec![false; num_params],
        }
    }

    pub fn has_started(&self, bucket: usize) -> bool {
        self.started[bucket].is_some() || self.is_reduced[bucket]
    }

    /// Whether no block owes a bucket anything.
    fn is_complete(&self, bucket: &Bucket) -> bool {
        let is_owed = |block: &usize| self.owed.get(block).is_none_or(|owed| *owed > 0);
        !bucket.blocks.iter().any(is_owed)
    }

    /// Notes the squares of this rank's part of a bucket that is reduced.
    fn settle(&mut self, params: &Parameters, index: usize, own: &FlatBuffer) -> Result<()> {
        let squares = match self.squares.take() {
            Some(squares) => squares,
            None => Squares::new(params)?,
        };
        squares.set(params, index, own)?;
        self.squares = Some(squares);
        self.is_settled[index] = true;
        Ok(())
    }

    pub fn clear(&mut self) {
        let is_summand = std::mem::take(&mut self.is_summand);
        *self = Self {
            is_summand,
            ..Self::new(self.started.len(), 0)
        };
    }
}

impl Gradients {
    /// Begins passes that may follow others of the same step: what is being summed of theirs is kept apart, and they add to nothing.
    /// Each of `blocks` will be [done](Self::block_done) with `num_micro_batches`.
    pub(crate) fn begin_passes(
        &mut self,
        blocks: impl Iterator<Item = usize>,
        num_micro_batches: usize,
    ) -> Result<()> {
        self.reductions.owed = blocks.map(|block| (block, num_micro_batches)).collect();
        let params = self.params.clone();
        for index in 0..params.layout().num_gradient_buckets() {
            let own = match self.reductions.started[index].take() {
                Some(sum) => sum.finish(params.groups())?,
                None if std::mem::take(&mut self.reductions.is_reduced[index]) => {
                    self.sums.own(index)?
                }
                None => continue,
            };
            self.reductions.is_settled[index] = false;
            match &self.reductions.earlier[index] {
                Some(earlier) => earlier.add(0, own.tensor())?,
                None => {
                    let copy = FlatBuffer::new(own.tensor().copy()?)?;
                    let copy = copy.counted(params.meter(), MemoryCategory::Gradients);
                    self.reductions.earlier[index] = Some(copy);
                }
            }
            self.filled[index].clear();
        }
        Ok(())
    }

    /// Tells that a block has computed the gradients of its weights for a micro-batch. From ZeRO-2 on these are summed now; else what no block
    /// owes anything any more is complete for the step, and its sum begins.
    pub(crate) fn block_done(&mut self, block: usize) -> Result<()> {
        let params = self.params.clone();
        if let Some(owed) = self.reductions.owed.get_mut(&block) {
            *owed = owed.saturating_sub(1);
        }
        let layout = params.layout();
        if params.groups().shards_gradients() {
            // Of what several blocks use the first one is the last to add to it.
            let is_complete =
                |index: &usize| layout.gradient_bucket(*index).blocks.first() == Some(&block);
            let mut complete = (0..layout.num_gradient_buckets()).filter(is_complete);
            return complete.try_for_each(|index| {
                // Zeros, if nothing was written here: other replicas may have something.
                self.whole(index)?;
                self.divide(index)
            });
        }
        if params.data_parallel().overlap && self.mesh.replicas.world_size() > 1 {
            self.start_complete()?;
        }
        match self.sums.is_away() {
            true => self.put_away(block),
            false => Ok(()),
        }
    }

    /// Starts the reductions of buckets that no block owes anything, in their order, which is the same on every replica, whatever the order of
    /// the passes.
    fn start_complete(&mut self) -> Result<()> {
        let params = self.params.clone();
        let layout = params.layout();
        for (index, bucket) in layout.buckets.iter().enumerate() {
            if bucket.tie.is_some() {
                continue;
            }
            if !self.reductions.is_complete(bucket) {
                break;
            }
            if !self.reductions.is_settled[index] {
                self.start_reduction(index)?;
                self.settle_before(index)?;
            }
        }
        Ok(())
    }

    /// Ends the reduction of all buckets but this one that are under way, if sums are away.
    fn settle_before(&mut self, last: usize) -> Result<()> {
        for index in 0..last {
            if self.sums.is_away() && self.reductions.has_started(index) {
                self.settle(index)?;
                self.reductions.is_reduced[index] = true;
            }
        }
        Ok(())
    }

    /// Ends passes: what is put away is written, so that what this rank holds is what is held of it.
    pub(crate) fn end_passes(&self) -> Result<()> {
        self.sums.finish()
    }

    /// Puts away what a block was the last one to add to in this micro-batch.
    fn put_away(&mut self, block: usize) -> Result<()> {
        let params = self.params.clone();
        let layout = params.layout();
        for index in 0..layout.num_gradient_buckets() {
            let is_last = layout.gradient_bucket(index).blocks.first() == Some(&block);
            if !is_last || self.reductions.has_started(index) {
                continue;
            }
            if let Some(whole) = self.whole[index].take() {
                self.note_squares(index, &whole)?;
                self.sums.put(index, whole);
            }
        }
        Ok(())
    }

    /// Notes the squares of what is here of a bucket if it is complete, and no other rank adds to it: it need not come back for that.
    fn note_squares(&mut self, index: usize, own: &FlatBuffer) -> Result<()> {
        let (params, groups) = (&self.params, self.params.groups());
        let Some(bucket) = params.layout().buckets.get(index) else {
            return Ok(());
        };
        let summing = match groups.shards_gradients() {
            true => &groups.replicate,
            false => &self.mesh.replicas,
        };
        let is_own = bucket.sharing == Sharing::None && bucket.tie.is_none();
        if is_own && summing.world_size() == 1 && self.reductions.is_complete(bucket) {
            self.reductions.settle(params, index, own)?;
        }
        Ok(())
    }

    /// Starts to sum a micro-batch's gradients of a bucket over the ranks that divide it.
    fn divide(&mut self, index: usize) -> Result<()> {
        let params = self.params.clone();
        let bucket = params.layout().gradient_bucket(index);
        let Some(whole) = self.whole[index].take() else {
            return Ok(());
        };
        // What was not written to is as it was made, zero.
        self.filled[index].clear();
        let is_summand = &mut self.reductions.is_summand;
        sum_shared_ranges(&params, bucket, &whole, &self.mesh.tp, is_summand)?;
        let sum = Sum::start(whole, bucket, params.groups(), params.meter())?;
        self.reductions.dividing.push_back((index, sum));
        match params.data_parallel().overlap {
            true => self.finish_dividing(MAX_DIVIDING),
            false => self.finish_dividing(0),
        }
    }

    /// Adds what was summed over the ranks to the slices, until at most `num_left` sums are under way.
    fn finish_dividing(&mut self, num_left: usize) -> Result<()> {
        while self.reductions.dividing.len() > num_left {
            let Some((index, sum)) = self.reductions.dividing.pop_front() else {
                break;
            };
            let sum = sum.finish(self.params.groups())?;
            let has_sum = std::mem::replace(&mut self.reductions.has_sum[index], true);
            let slice = self.sums.take(index, has_sum)?;
            match has_sum {
                true => slice.add(0, sum.tensor())?,
                false => slice.write(0, sum.tensor())?,
            }
            drop(sum);
            let is_last = !self.reductions.dividing.iter().any(|(of, _)| *of == index);
            if self.sums.is_away() && is_last {
                self.note_squares(index, &slice)?;
            }
            self.sums.put(index, slice);
        }
        Ok(())
    }

    /// Sums the gradients of a step over all ranks, and computes their norm and the loss.
    ///
    /// The result is the gradient of the mean of the losses over all targets of the global batch: this is the one place where the sum of
    /// losses is divided. Norm, loss and number of targets come to the host in one read, for which it waits for a GPU; if tensor-parallel
    /// ranks hold copies of parameters, the gradients of these are read before, to compare them. The gradients are cleared, also by an
    /// error; what is returned may share their buffers and must be used before the next backward pass.
    ///
    /// # Errors
    /// A trainable parameter without a gradient, copies of a parameter whose gradients differ, in the first steps also blocks whose
    /// outputs or gradients differ over tensor-parallel ranks, a global batch without targets, and failures of ranks.
    pub fn reduce(&mut self) -> Result<ReducedGradients> {
        self.reduce_for(None)
    }

    /// [`Self::reduce`], for an update about which all ranks must say the same.
    pub(crate) fn reduce_for(&mut self, update: Option<&UpdateNotice>) -> Result<ReducedGradients> {
        let reduced = self.sum_and_compare(update);
        self.clear();
        reduced
    }

    fn sum_and_compare(&mut self, update: Option<&UpdateNotice>) -> Result<ReducedGradients> {
        let params = self.params.clone();
        let buckets = &params.layout().buckets;
        let mut reduced = Vec::with_capacity(buckets.len());
        if params.groups().shards_gradients() {
            // What was added by hand, not by a backward pass.
            let num_gradient_buckets = params.layout().num_gradient_buckets();
            (0..num_gradient_buckets).try_for_each(|index| self.divide(index))?;
            self.finish_dividing(0)?;
        }
        // Without overlap two buckets are under way at a time.
        for index in 0..=buckets.len() {
            for stage in params.layout().stages_of(index) {
                self.start_reduction(stage)?;
            }
            if let Some(earlier) = index.checked_sub(1) {
                reduced.extend(self.settle(earlier)?);
            }
        }
        self.sums.finish()?;
        let reduced = match self.sums.is_away() {
            true => ReducedBuckets::Away(Arc::clone(&self.sums)),
            false => ReducedBuckets::Here(reduced),
        };
        let squares = match self.reductions.squares.take() {
            Some(squares) => squares.sum()?,
            None => Tensor::zeros(1, DType::F64, self.mesh.world.device())?,
        };
        let compared = [
            self.compared_copies(&reduced)?,
            self.compared_update(update),
        ];
        let written = update.and_then(|update| update.written.as_ref());
        let written = written.map(|written| written.distance()).transpose()?;
        let (sums, pipeline) = self.sums(squares, compared, written)?;
        self.judge(&reduced, &sums, update)?;
        let [squares, loss_sum, num_targets, num_asking, num_reported, ..] = sums;
        if num_targets <= 0.0 {
            bail!("the global batch has no targets: there is nothing to learn from");
        }
        let loss = ReducedLoss {
            mean: loss_sum / num_targets,
            num_targets: num_targets as usize,
        };
        let metrics = match num_reported > 0.0 {
            true => self.metrics(num_targets)?,
            false => BTreeMap::new(),
        };
        let divisor = num_targets * self.loss_scale;
        let whole = self.whole.iter();
        Ok(ReducedGradients {
            params: self.params.clone(),
            mesh: self.mesh.clone(),
            buckets: reduced,
            whole: whole
                .take(buckets.len())
                .map(|flat| Some(flat.as_ref()?.tensor().clone()))
                .collect(),
            clip: 1.0,
            scale: 1.0 / divisor,
            norm: squares.sqrt() / divisor,
            loss,
            metrics,
            is_asked_to_stop: num_asking > 0.0,
            pipeline,
            is_compared: update.is_some(),
        })
    }

    /// Sums over all ranks, on the host: of squares, of losses, of targets, of ranks that ask to stop, and of what is compared. With them comes what
    /// the ranks of the first pipeline have done, each of which has places of its own. `compared` are this rank's summands for copies and for
    /// what all say about the update, `written` how far weights are from where the last update left them, one value on the device.
    fn sums(
        &self,
        squares: Tensor,
        compared: [f64; 2],
        written: Option<Tensor>,
    ) -> Result<([f64; NUM_SUMS], Vec<PipelineRank>)> {
        let zero = Tensor::zeros(1, DType::F64, self.mesh.world.device())?;
        let totals = &self.totals;
        // Tensor-parallel ranks have the same targets, and those of the last stage the same loss.
        let is_first_tp = self.mesh.tp.rank() == 0;
        let loss_sum = totals.loss_sum.as_ref().filter(|_| is_first_tp);
        let counted = loss_sum.map_or(0.0, |_| totals.num_targets);
        let loss_sum = loss_sum.map_or_else(|| Ok(zero.clone()), |sum| sum.reshape(1))?;
        // Filled by a kernel: a copy of the host's number would wait for the GPU.
        let filled = |value: f64| match value {
            0.0 => Ok(zero.clone()),
            _ => zero.affine(0.0, value),
        };
        let is_first = is_first_tp && self.mesh.pp.rank() == 0 && self.mesh.cp.rank() == 0;
        let num_targets = filled(match totals.said_targets {
            Some(said) if is_first => said,
            Some(_) => 0.0,
            None => counted,
        })?;
        let num_asking = filled(f64::from(u8::from(totals.asks_to_stop)))?;
        let num_reported = filled(totals.reported.len() as f64)?;
        let (copies, update) = (filled(compared[0])?, filled(compared[1])?);
        let written = written.unwrap_or_else(|| zero.clone());
        let mut sums = vec![
            squares,
            loss_sum,
            num_targets,
            num_asking,
            num_reported,
            copies,
            update,
            written,
        ];
        for numbers in self.of_pipeline_ranks() {
            let numbers = numbers.into_iter().map(filled);
            sums.extend(numbers.collect::<Result<Vec<_>>>()?);
        }
        let sums = Tensor::cat(&sums, 0)?;
        let sums = self.mesh.world.all_reduce(&sums, ReduceOp::Sum)?;
        let sums = sums.to_vec1::<f64>()?;
        // Communication on GPUs may have failed without a word until now.
        self.mesh.check()?;
        self.params.groups().check()?;
        let Some((sums, of_ranks)) = sums.split_first_chunk() else {
            bail!("{NUM_SUMS} sums were expected, {} came", sums.len());
        };
        Ok((*sums, pipeline_ranks(of_ranks)))
    }

    /// What this rank adds to the numbers of each rank of the first replica's pipeline: busy seconds, those of all passes, the peak of
    /// activations.
    fn of_pipeline_ranks(&self) -> Vec<[f64; NUM_OF_RANK]> {
        let (pp, mesh) = (&self.mesh.pp, &self.mesh);
        if pp.world_size() == 1 {
            return Vec::new();
        }
        let mut all = vec![[0.0; NUM_OF_RANK]; pp.world_size()];
        if mesh.replicas.rank() == 0 && mesh.tp.rank() == 0 {
            let known = self.totals.occupation;
            let [busy, whole] = known.map_or([f64::NAN, 0.0], |known| [known.busy, known.whole]);
            let memory = self.params.meter().report();
            let activations = memory.measured(MemoryCategory::Activations);
            let peak = activations.map_or(f64::NAN, |activations| activations.peak as f64);
            all[pp.rank()] = [busy, whole, peak];
        }
        all
    }

    /// What blocks of all ranks have reported, by name: losses divided by the number of targets, other numbers by how often they were. Every
    /// rank must call it.
    fn metrics(&mut self, num_targets: f64) -> Result<BTreeMap<String, f64>> {
        let mesh = &self.mesh;
        let place = (mesh.pp.rank(), mesh.replicas.rank(), mesh.tp.rank());
        let of_ranks: Vec<OfRank> = gather(&mesh.world, &(place, &self.totals.reported))?;
        if !self.has_warned_of_reports
            && let Some(name) = reported_unlike(&of_ranks)
        {
            self.has_warned_of_reports = true;
            if mesh.world.rank() == 0 {
                tracing::warn!(
                    "tensor-parallel ranks report {name} with other values or not all of them: the first one's is taken\nhint: report what all have, outside \
                     of tensor-parallel regions"
                );
            }
        }
        let mut all: BTreeMap<String, Reported> = BTreeMap::new();
        for ((_, _, tp), of_rank) in of_ranks {
            if tp > 0 {
                continue;
            }
            for (name, reported) in of_rank {
                let known = all.entry(name).or_default();
                *known = known.plus(reported);
            }
        }
        let mean = |reported: Reported| match reported.count {
            0 => reported.sum() / num_targets,
            count => reported.sum() / count as f64,
        };
        Ok(all.into_iter().map(|(name, of)| (name, mean(of))).collect())
    }

    /// Starts the reduction of a bucket over the data-parallel ranks, unless that was done; of a divided one it has been.
    fn start_reduction(&mut self, index: usize) -> Result<()> {
        let params = self.params.clone();
        let (bucket, groups) = (params.layout().gradient_bucket(index), params.groups());
        if self.reductions.has_started(index) {
            return Ok(());
        }
        self.check_complete(bucket)?;
        if groups.shards_gradients() || self.reductions.is_settled[index] {
            return Ok(()); // The sum is in the slice, or done.
        }
        let whole = self.whole(index)?.clone();
        // What earlier passes of the step gave to these, and these did not, lies in `earlier`.
        self.write_missing(index, &whole)?;
        let is_summand = &mut self.reductions.is_summand;
        sum_shared_ranges(&params, bucket, &whole, &self.mesh.tp, is_summand)?;
        let started = Sum::start(whole, bucket, groups, params.meter())?;
        self.reductions.started[index] = Some(started);
        Ok(())
    }

    /// Ends the reduction of a bucket: this rank's part of it, unless that is away.
    fn settle(&mut self, index: usize) -> Result<Option<FlatBuffer>> {
        if self.reductions.is_settled[index] {
            return Ok(None);
        }
        let own = self.finish_stages(index)?;
        // While what was just reduced is in the cache.
        self.reductions.settle(&self.params, index, &own)?;
        if !self.sums.is_away() {
            return Ok(Some(own));
        }
        let stages: Vec<usize> = self.params.layout().stages_of(index).collect();
        let whole = stages.iter().map(|&stage| self.whole[stage].take());
        let whole: Vec<Option<FlatBuffer>> = whole.collect();
        let whole = whole.into_iter().next().flatten();
        self.sums.put(index, whole.unwrap_or(own));
        Ok(None)
    }

    /// This rank's part of a bucket, summed over all ranks and, of tied parameters, over the stages that use them.
    fn finish_stages(&mut self, index: usize) -> Result<FlatBuffer> {
        let params = self.params.clone();
        let bucket = &params.layout().buckets[index];
        let stages = params.layout().stages_of(index);
        let stages = stages.map(|stage| self.finish_reduction(stage));
        let stages = stages.collect::<Result<Vec<_>>>()?;
        let Some(own) = stages.first().cloned() else {
            bail!("bucket {index} of the gradients is of no stage")
        };
        if let Some(tie) = bucket.tie {
            params.ties()[tie].sum(&stages)?;
        }
        if bucket.sharing == Sharing::Copies && !self.mesh.replicas.sums_in_rank_order() {
            self.take_first_copy(&own)?;
        }
        Ok(own)
    }

    /// This rank's part of a stage's gradients of a bucket, summed over the replicas.
    fn finish_reduction(&mut self, index: usize) -> Result<FlatBuffer> {
        let params = self.params.clone();
        let groups = params.groups();
        let own = match self.reductions.started[index].take() {
            Some(started) => started.finish(groups)?,
            None => {
                let has_sum = self.reductions.has_sum[index];
                let slice = self.sums.take(index, has_sum)?;
                if !has_sum {
                    // It has what an earlier step left.
                    slice.write(0, &slice.tensor().zeros_like()?)?;
                }
                slice
            }
        };
        if let Some(earlier) = self.reductions.earlier[index].take() {
            own.add(0, earlier.tensor())?;
        }
        // Sums over slices, of which each rank has one, move less than sums over whole buckets.
        if groups.shard.world_size() > 1 {
            let copies = &groups.replicate;
            let sum = copies.start_all_reduce_in_place(own.tensor(), ReduceOp::Sum)?;
            sum.wait()?;
        }
        Ok(own)
    }

    /// An error that names the first parameter of a bucket without a gradient, if there is one.
    pub(super) fn check_complete(&self, bucket: &Bucket) -> Result<()> {
        let mut slots = bucket.slots.iter();
        let lacks = |slot: &&Slot| {
            let param = self.params.get(slot.param);
            let may_lack = param.is_of_blocks() && !param.needs_gradient();
            !self.has_gradient[slot.param] && !may_lack
        };
        match slots.find(lacks) {
            None => Ok(()),
            Some(slot) => {
                let param = self.params.get(slot.param);
                let hint = match param.is_of_blocks() {
                    true => {
                        "run the backward pass of at least one micro-batch before the optimizer"
                    }
                    false => {
                        "it was asked for outside of blocks, and no block of this pipeline stage uses it: ask for it with the builder \
                         of the block that does"
                    }
                };
                bail!(
                    "parameter {} got no gradient in this step\nhint: {hint}",
                    param.name
                )
            }
        }
    }
}

/// From the numbers of each rank.
fn pipeline_ranks(numbers: &[f64]) -> Vec<PipelineRank> {
    let (of_ranks, _) = numbers.as_chunks::<NUM_OF_RANK>();
    let longest = of_ranks.iter().map(|[_, whole, _]| *whole);
    let longest = longest.fold(0.0, f64::max);
    let of_rank = |[busy, _, peak]: &[f64; NUM_OF_RANK]| PipelineRank {
        idle_share: (longest > 0.0 && !busy.is_nan()).then(|| (1.0 - busy / longest).max(0.0)),
        peak_activations_bytes: (!peak.is_nan()).then_some(*peak as u64),
    };
    of_ranks.iter().map(of_rank).collect()
}
