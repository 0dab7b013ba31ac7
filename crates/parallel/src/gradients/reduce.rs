//! The reduction of gradients over the ranks of the mesh, bucket by bucket, under the backward pass.
//!
//! The order in which a rank starts reductions follows from the layout alone: blocks from the last to the first as their
//! backward passes end, then parameters tied across stages, when all passes are over. Whether reductions overlap with the
//! backward pass changes when they start, not their order, and so no bit.

use std::collections::VecDeque;

use candle_comm::{Mesh, ReduceOp};
use candle_core::{DType, Result, Tensor, bail};
use candle_ops::sum_of_squares_into;

use super::accumulate::Gradients;
use super::reduced::{ReducedGradients, ReducedLoss};
use super::shared::sum_overlaps;
use super::transfer::Sum;
use crate::params::{Bucket, Checksums, FlatBuffer, Parameters, intersect, joined};
use crate::pipeline::PassReport;

/// Reductions under way.
pub(super) struct Reductions {
    /// Of whole buckets, one after the last micro-batch.
    started: Vec<Option<Sum>>,
    /// Of divided buckets, one after each micro-batch.
    dividing: VecDeque<(usize, Sum)>,
    /// Whether the slice of a divided bucket holds the sum of some micro-batches.
    has_sum: Vec<bool>,
    /// Of the gradients that several tensor-parallel ranks hold, until they have been compared once.
    checksums: Option<Checksums>,
}

/// Divided buckets that are whole on this rank while they are summed, at most; one more is being written to. One that several blocks
/// write to is whole from the first write until the backward pass of its first block.
const MAX_DIVIDING: usize = 1;

impl Reductions {
    pub fn new(num_buckets: usize, mesh: &Mesh) -> Self {
        Self {
            started: (0..num_buckets).map(|_| None).collect(),
            dividing: VecDeque::new(),
            has_sum: vec![false; num_buckets],
            checksums: (mesh.tp.world_size() > 1).then(Checksums::default),
        }
    }

    pub fn has_started(&self, bucket: usize) -> bool {
        self.started[bucket].is_some()
    }

    pub fn clear(&mut self) {
        self.started.fill_with(|| None);
        self.dividing.clear();
        self.has_sum.fill(false);
    }
}

impl Gradients {
    /// Tells that a micro-batch's backward pass has left block `block`: what only it and later blocks add to is complete, for this
    /// micro-batch or, if it is the last one, for the step.
    pub(crate) fn block_done(&mut self, block: usize, is_last_micro_batch: bool) -> Result<()> {
        let params = self.params.clone();
        let (groups, overlaps) = (params.groups(), params.data_parallel().overlap);
        let is_early = overlaps && is_last_micro_batch && self.mesh.dp.world_size() > 1;
        let buckets = params.layout().buckets.iter().enumerate();
        for (index, bucket) in buckets.filter(|(_, bucket)| bucket.block == block) {
            if groups.shards_gradients() {
                self.divide(index)?;
            } else if is_early && bucket.tie.is_none() {
                self.start_reduction(index)?;
            }
        }
        Ok(())
    }

    /// Starts to sum a micro-batch's gradients of a bucket over the ranks that divide it.
    fn divide(&mut self, index: usize) -> Result<()> {
        let params = self.params.clone();
        let bucket = &params.layout().buckets[index];
        let Some(whole) = self.whole[index].take() else {
            return Ok(());
        };
        // What was not written to is as it was made, zero.
        for slot in &bucket.slots {
            self.is_filled[slot.param] = false;
        }
        sum_overlaps(&params, bucket, &whole, &self.mesh.tp)?;
        let mut dividing = self.reductions.dividing.iter();
        let is_first =
            !self.reductions.has_sum[index] && dividing.all(|(other, _)| *other != index);
        if is_first {
            self.add_checksums(bucket, &whole)?;
        }
        let sum = Sum::start(whole, bucket, (params.groups(), params.meter()))?;
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
            let (slice, sum) = (&self.slices[index], sum.finish(self.params.groups())?);
            match std::mem::replace(&mut self.reductions.has_sum[index], true) {
                true => slice.add(0, sum.tensor())?,
                false => slice.write(0, sum.tensor())?,
            }
        }
        Ok(())
    }

    /// Sums the gradients of a step over all ranks, and computes their norm and the loss.
    ///
    /// `report` is what the passes of this step gave. The result is the gradient of the mean of the losses over all targets of the
    /// global batch: this is the one place where the sum of losses is divided. Norm, loss and number of targets come to the host
    /// in one read: on a GPU the only time in a step that the host waits for it. The gradients are cleared; what is returned
    /// may share their buffers and must be used before the next backward pass.
    ///
    /// # Errors
    /// A trainable parameter without a gradient, copies of a parameter whose gradients differ (found in the first step), a
    /// global batch without targets, and failures of ranks.
    pub fn reduce(&mut self, report: &PassReport) -> Result<ReducedGradients> {
        let params = self.params.clone();
        let buckets = &params.layout().buckets;
        let zero = Tensor::zeros(1, DType::F64, self.mesh.world.device())?;
        let squares = zero.copy()?;
        let mut reduced = Vec::with_capacity(buckets.len());
        if params.groups().shards_gradients() {
            // What was added by hand, not by a backward pass.
            (0..buckets.len()).try_for_each(|index| self.divide(index))?;
            self.finish_dividing(0)?;
        }
        // Without overlap two buckets are under way at a time.
        for index in 0..=buckets.len() {
            if index < buckets.len() {
                self.start_reduction(index)?;
            }
            if let Some(earlier) = index.checked_sub(1) {
                let flat = self.finish_reduction(earlier)?;
                // While what was just reduced is in the cache.
                add_squares(&params, &squares, &buckets[earlier], &flat)?;
                reduced.push(flat);
            }
        }
        if let Some(checksums) = self.reductions.checksums.take() {
            let when = "in the first step";
            self.clear();
            checksums.compare(&self.mesh, "gradient", when)?;
            self.params
                .check_copies(&self.mesh, when, |index| params.values(index))?;
        }
        self.clear();
        let [squares, loss_sum, num_targets, num_asking] = self.sums(squares, zero, report)?;
        if num_targets < 1.0 {
            bail!("the global batch has no targets: there is nothing to learn from");
        }
        let loss = ReducedLoss {
            mean: loss_sum / num_targets,
            num_targets: num_targets as usize,
        };
        let divisor = num_targets * self.loss_scale;
        let whole = self.whole.iter();
        Ok(ReducedGradients {
            params: self.params.clone(),
            mesh: self.mesh.clone(),
            buckets: reduced,
            whole: whole
                .map(|flat| Some(flat.as_ref()?.tensor().clone()))
                .collect(),
            clip: 1.0,
            scale: 1.0 / divisor,
            norm: squares.sqrt() / divisor,
            loss,
            is_asked_to_stop: num_asking > 0.0,
        })
    }

    /// Sums over all ranks, on the host: of squares, of losses, of targets, of ranks that ask to stop.
    fn sums(&self, squares: Tensor, zero: Tensor, report: &PassReport) -> Result<[f64; 4]> {
        // The ranks of a replica have the same targets, and those of its last stage the same loss.
        let is_first_tp = self.mesh.tp.rank() == 0;
        let loss_sum = report.loss_sum.as_ref().filter(|_| is_first_tp);
        let loss_sum = loss_sum.map_or_else(|| Ok(zero.clone()), |sum| sum.reshape(1))?;
        // Filled by a kernel: a copy of the host's number would wait for the GPU.
        let filled = |value: f64| match value {
            0.0 => Ok(zero.clone()),
            _ => zero.affine(0.0, value),
        };
        let counts_targets = is_first_tp && self.mesh.pp.rank() == 0;
        let num_targets = filled(if counts_targets {
            report.num_targets as f64
        } else {
            0.0
        })?;
        let num_asking = filled(f64::from(u8::from(report.asks_to_stop)))?;
        let sums = Tensor::cat(&[squares, loss_sum, num_targets, num_asking], 0)?;
        let sums = self.mesh.world.all_reduce(&sums, ReduceOp::Sum)?;
        let sums = sums.to_vec1::<f64>()?;
        // Communication on GPUs may have failed without a word until now.
        self.mesh.check()?;
        self.params.groups().check()?;
        match sums.as_slice() {
            &[squares, loss, targets, asking] => Ok([squares, loss, targets, asking]),
            other => bail!("4 sums were expected, {} came", other.len()),
        }
    }

    /// Starts the reduction of a bucket over the data-parallel ranks, unless that was done; of a divided one it has been.
    fn start_reduction(&mut self, index: usize) -> Result<()> {
        let params = self.params.clone();
        let (bucket, groups) = (&params.layout().buckets[index], params.groups());
        if self.reductions.has_started(index) {
            return Ok(());
        }
        self.check_complete(bucket)?;
        let Some(whole) = self.whole[index].clone() else {
            return Ok(()); // The sum is in the slice.
        };
        sum_overlaps(&params, bucket, &whole, &self.mesh.tp)?;
        self.add_checksums(bucket, &whole)?;
        let started = Sum::start(whole, bucket, (groups, params.meter()))?;
        self.reductions.started[index] = Some(started);
        Ok(())
    }

    /// This rank's part of a bucket, summed over all ranks.
    fn finish_reduction(&mut self, index: usize) -> Result<FlatBuffer> {
        let params = self.params.clone();
        let (bucket, groups) = (&params.layout().buckets[index], params.groups());
        let own = match self.reductions.started[index].take() {
            Some(started) => started.finish(groups)?,
            None => self.slices[index].clone(),
        };
        // Sums over slices, of which each rank has one, move less than sums over whole buckets.
        if groups.shard.world_size() > 1 {
            let copies = &groups.copies;
            let sum = copies.start_all_reduce_in_place(own.tensor(), ReduceOp::Sum)?;
            sum.wait()?;
        }
        if let Some(tie) = bucket.tie {
            let stages = &params.ties()[tie].group;
            let sum = stages.start_all_reduce_in_place(own.tensor(), ReduceOp::Sum)?;
            sum.wait()?;
        }
        Ok(own)
    }

    /// Notes what this rank has of the gradients that several tensor-parallel ranks hold, in the first step.
    fn add_checksums(&mut self, bucket: &Bucket, whole: &FlatBuffer) -> Result<()> {
        let Some(checksums) = &mut self.reductions.checksums else {
            return Ok(());
        };
        for slot in &bucket.slots {
            let values = whole.view(slot.range.start, slot.range.len())?;
            let values = values.reshape(self.params.get(slot.param).local_shape())?;
            checksums.add(&self.params, slot.param, &values)?;
        }
        Ok(())
    }

    /// An error that names the first parameter of a bucket without a gradient, if there is one.
    pub(super) fn check_complete(&self, bucket: &Bucket) -> Result<()> {
        let mut slots = bucket.slots.iter();
        match slots.find(|slot| !self.has_gradient[slot.param]) {
            None => Ok(()),
            Some(slot) => bail!(
                "parameter {} got no gradient in this step\nhint: run the backward pass of at least one micro-batch before \
                 the optimizer",
                self.params.get(slot.param).name
            ),
        }
    }
}

/// Adds to `sum` the squares of the values of a reduced bucket that this rank owns: each of the model counts on one.
pub(super) fn add_squares(
    params: &Parameters,
    sum: &Tensor,
    bucket: &Bucket,
    flat: &FlatBuffer,
) -> Result<()> {
    let groups = params.groups();
    if groups.copies.rank() > 0 {
        return Ok(());
    }
    let own = groups.own_range(bucket.len);
    let owned = bucket.slots.iter().flat_map(|slot| {
        let start = slot.range.start;
        let owned = params.owned(slot.param).iter();
        owned.map(move |owned| start + owned.start..start + owned.end)
    });
    for owned in joined(owned.map(|owned| intersect(&owned, &own))) {
        let values = flat.view(owned.start - own.start, owned.len())?;
        sum_of_squares_into(sum, true, &values)?;
    }
    Ok(())
}
