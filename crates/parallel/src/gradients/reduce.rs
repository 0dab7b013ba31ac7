//! The reduction of gradients over the ranks of the mesh, bucket by bucket, under the backward pass.
//!
//! The order in which a rank starts reductions follows from the layout alone (`program/lower/sums.rs`): blocks from the last to the first as their
//! backward passes end, then parameters tied across stages, when all passes are over. Whether reductions overlap with the
//! backward pass changes when they start, not their order, and so no bit.

use std::collections::{BTreeMap, VecDeque};
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
use crate::program::SumPlaces;

/// The sums of a step over the ranks.
pub(super) struct Reductions {
    /// Sums under way with their buckets, as they were started.
    under_way: VecDeque<(usize, Sum)>,
    /// Whether the slice of a divided bucket holds the sum of some micro-batches.
    pub(super) has_sum: Vec<bool>,
    /// Whether the sum of a whole bucket has begun: nothing can be added to it any more.
    pub(super) has_begun: Vec<bool>,
    /// This rank's parts of what earlier passes of the step gave, where that was summed before they went on.
    earlier: Vec<Option<FlatBuffer>>,
    /// Whether the sum of a bucket is over all ranks and micro-batches, with its squares known.
    pub(super) is_settled: Vec<bool>,
    /// This rank's parts of settled buckets, unless sums are away.
    own: Vec<Option<FlatBuffer>>,
    /// Squares of settled buckets.
    squares: Option<Squares>,
    /// Whether the gradients of tensor-parallel ranks were seen to be summands, by parameter.
    is_summand: Vec<bool>,
}

/// Steps in which tensor-parallel ranks compare what passes between blocks: more than one, as a weight that begins as zeros hides what is
/// behind it, and a product of two such weights does so twice.
pub(super) const NUM_COMPARED: usize = 3;

/// Numbers that a step sums over all ranks.
pub(super) const NUM_SUMS: usize = 8;

/// Numbers of each rank of a pipeline that come with them.
const NUM_OF_RANK: usize = 3;

impl Reductions {
    pub fn new(num_buckets: usize, num_params: usize) -> Self {
        Self {
            under_way: VecDeque::new(),
            has_sum: vec![false; num_buckets],
            has_begun: vec![false; num_buckets],
            earlier: vec![None; num_buckets],
            is_settled: vec![false; num_buckets],
            own: vec![None; num_buckets],
            squares: None,
            is_summand: vec![false; num_params],
        }
    }

    /// The earliest sum of a bucket that is under way.
    fn take_sum(&mut self, index: usize) -> Option<Sum> {
        let place = self.under_way.iter().position(|(of, _)| *of == index)?;
        Some(self.under_way.remove(place)?.1)
    }

    /// Notes the squares of this rank's part of a bucket that is reduced.
    fn note_squares(&mut self, params: &Parameters, index: usize, own: &FlatBuffer) -> Result<()> {
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
            ..Self::new(self.has_begun.len(), 0)
        };
    }
}

impl Gradients {
    /// Begins passes that may follow others of the same step: what is being summed of theirs is kept apart, and they add to nothing.
    pub(crate) fn begin_passes(&mut self) -> Result<()> {
        let params = self.params.clone();
        for index in 0..params.layout().num_gradient_buckets() {
            if !std::mem::take(&mut self.reductions.has_begun[index]) {
                continue;
            }
            let own = match self.reductions.take_sum(index) {
                Some(sum) => sum.finish(params.groups())?,
                None => self.sums.own_part(index, self.sums.read(index)?)?,
            };
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
        while let Some((index, _)) = self.reductions.under_way.front() {
            self.add_reduced(*index)?;
        }
        self.reductions.is_settled.fill(false);
        let column = self.column();
        (column.visitors().into_iter()).try_for_each(|index| column.put(index))?;
        column.forget_read();
        column.flush()
    }

    /// Where sums are, from which what follows the passes is worked out.
    pub(crate) fn places(&self) -> SumPlaces {
        let is_divided = self.sums.is_divided;
        let under_way = self.reductions.under_way.iter().map(|(index, _)| *index);
        let under_way: VecDeque<usize> = under_way.collect();
        let num_buckets = self.whole.len();
        let is_started = (0..num_buckets).map(|index| !is_divided && under_way.contains(&index));
        let is_started: Vec<bool> = is_started.collect();
        let idle = self.column().visitors().into_iter();
        SumPlaces {
            is_whole: self.whole.iter().map(Option::is_some).collect(),
            is_settled: self.reductions.is_settled.clone(),
            idle: idle.filter(|index| !is_started[*index]).collect(),
            dividing: if is_divided {
                under_way
            } else {
                VecDeque::new()
            },
            is_started,
        }
    }

    /// Starts the sum of a bucket over the data-parallel ranks.
    pub(crate) fn start_sum(&mut self, index: usize) -> Result<()> {
        let params = self.params.clone();
        let (bucket, groups) = (params.layout().gradient_bucket(index), params.groups());
        let whole = if self.sums.is_divided {
            // Places that were not written to are as they were made, zero.
            self.filled[index].clear();
            match self.whole[index].take() {
                Some(whole) => whole,
                None => bail!("bucket {index} of gradients is to be divided before it is there"),
            }
        } else {
            self.check_complete(bucket)?;
            let whole = self.sum(index)?;
            // Gradients of earlier passes of the step lie in `earlier`.
            self.write_missing(index, &whole)?;
            self.reductions.has_begun[index] = true;
            whole
        };
        let is_summand = &mut self.reductions.is_summand;
        sum_shared_ranges(&params, bucket, &whole, &self.mesh.tp, is_summand)?;
        let sum = Sum::start(whole, bucket, groups, params.meter())?;
        self.reductions.under_way.push_back((index, sum));
        Ok(())
    }

    /// Adds to this rank's slice of a bucket what was summed over the ranks first.
    pub(crate) fn add_reduced(&mut self, index: usize) -> Result<()> {
        let Some(sum) = self.reductions.take_sum(index) else {
            bail!("bucket {index} of gradients is not being summed");
        };
        let sum = sum.finish(self.params.groups())?;
        let slice = self.sum(index)?;
        if std::mem::replace(&mut self.reductions.has_sum[index], true) {
            slice.add(0, sum.tensor())
        } else {
            slice.write(0, sum.tensor())
        }
    }

    /// Notes the squares of a sum that nothing is added to any more, and that no other rank has a part in.
    pub(crate) fn square(&mut self, index: usize) -> Result<()> {
        let own = self.sum(index)?;
        self.reductions.note_squares(&self.params, index, &own)
    }

    /// Ends the sum of a bucket over all ranks and, of tied parameters, over the stages that use them.
    pub(crate) fn settle(&mut self, index: usize) -> Result<()> {
        let own = self.finish_stages(index)?;
        // While what was just reduced is in the cache.
        self.reductions.note_squares(&self.params, index, &own)?;
        if !self.column().is_away() {
            self.reductions.own[index] = Some(own);
        }
        Ok(())
    }

    /// An error if a trainable parameter got no gradient in this step.
    pub(crate) fn check_all_complete(&self) -> Result<()> {
        let mut buckets = self.params.layout().of_gradients();
        buckets.try_for_each(|bucket| self.check_complete(bucket))
    }

    /// Norm and loss over all ranks, when all sums are over. Every rank must call it.
    pub(crate) fn norm(&mut self, update: Option<&UpdateNotice>) -> Result<ReducedGradients> {
        let reduced = if self.column().is_away() {
            ReducedBuckets::Away(Arc::clone(&self.sums))
        } else {
            let own = self.reductions.own.iter_mut();
            let own = own.take(self.params.layout().buckets.len());
            match own.map(Option::take).collect::<Option<Vec<_>>>() {
                Some(own) => ReducedBuckets::Here(own),
                None => bail!("the norm is asked for before all gradients are summed"),
            }
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
        let has_whole = !self.come_once();
        let whole = (0..self.params.layout().buckets.len()).map(|index| {
            let whole = has_whole.then(|| self.sums.get(index)).transpose()?;
            Ok(whole.map(FlatBuffer::into_tensor))
        });
        Ok(ReducedGradients {
            params: self.params.clone(),
            mesh: self.mesh.clone(),
            buckets: reduced,
            whole: whole.collect::<Result<_>>()?,
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
        let own = match self.reductions.take_sum(index) {
            Some(sum) => sum.finish(groups)?,
            None => {
                let slice = self.sum(index)?;
                if !self.reductions.has_sum[index] {
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
