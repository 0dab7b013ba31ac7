//! The reduction of gradients over the ranks of the mesh, bucket by bucket, under the backward pass.
//!
//! The order in which a rank starts reductions follows from the layout alone: blocks from the last to the first as their
//! backward passes end, then parameters tied across stages, when all passes are over. Whether reductions overlap with the
//! backward pass changes when they start, not their order, and so no bit.

use std::ops::Range;

use candle_comm::{Mesh, Pending, ReduceOp};
use candle_core::{DType, Result, Tensor, bail};
use candle_ops::sum_of_squares_into;
use serde::{Deserialize, Serialize};

use super::accumulate::Gradients;
use super::reduced::{ReducedGradients, ReducedLoss};
use super::shared::sum_overlaps;
use crate::params::{Bucket, Checksums, FlatBuffer, intersect, joined};
use crate::pipeline::PassReport;

/// What data-parallel ranks divide between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ZeroStage {
    /// Nothing: gradients are all-reduced, every rank updates everything.
    Zero,
    /// Optimizer state: gradients are reduce-scattered, each rank updates its slice, weights are all-gathered.
    One,
}

/// How data-parallel replicas work together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataParallel {
    /// What the replicas divide between them.
    pub zero: ZeroStage,
    /// Whether communication runs under computation: gradients are reduced under the backward pass, updated weights gathered
    /// under the next forward pass. The bits are the same without.
    ///
    /// With it, weights that other replicas updated arrive after the update has returned. A [`Stage`](crate::Stage) waits for those
    /// of a block before it runs the block, and [`Param::values`](crate::Param::values) waits for all. Code that runs layers or reads
    /// their tensors outside of a stage calls [`Parameters::wait_for_updates`](crate::Parameters::wait_for_updates) first.
    pub overlap: bool,
}

impl Default for DataParallel {
    /// ZeRO-1, overlapping.
    fn default() -> Self {
        Self {
            zero: ZeroStage::One,
            overlap: true,
        }
    }
}

impl From<ZeroStage> for DataParallel {
    fn from(zero: ZeroStage) -> Self {
        Self {
            zero,
            ..Self::default()
        }
    }
}

impl DataParallel {
    /// The part of a bucket that this rank updates.
    pub(crate) fn own_range(self, bucket: &Bucket, mesh: &Mesh) -> Range<usize> {
        match self.zero {
            ZeroStage::Zero => 0..bucket.len,
            ZeroStage::One => {
                let len = bucket.len / mesh.dp.world_size();
                let rank = mesh.dp.rank();
                rank * len..(rank + 1) * len
            }
        }
    }
}

/// Reductions under way.
pub(super) struct Reductions {
    started: Vec<Option<Pending<Tensor>>>,
    /// Of the gradients that several tensor-parallel ranks hold, until they have been compared once.
    checksums: Option<Checksums>,
}

impl Reductions {
    pub fn new(num_buckets: usize, mesh: &Mesh) -> Self {
        Self {
            started: (0..num_buckets).map(|_| None).collect(),
            checksums: (mesh.tp.world_size() > 1).then(Checksums::default),
        }
    }

    pub fn has_started(&self, bucket: usize) -> bool {
        self.started[bucket].is_some()
    }

    pub fn clear(&mut self) {
        self.started.fill_with(|| None);
    }
}

impl Gradients {
    /// Tells that the last micro-batch's backward pass has left block `block`: what only it and later blocks add to is complete.
    pub(crate) fn block_done(&mut self, block: usize) -> Result<()> {
        if !self.config.overlap || self.mesh.dp.world_size() == 1 {
            return Ok(());
        }
        let params = self.params.clone();
        for (index, bucket) in params.layout().buckets.iter().enumerate() {
            if bucket.tie.is_none() && bucket.block == block {
                self.start_reduction(index)?;
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
        // Without overlap two buckets are under way at a time.
        for index in 0..=buckets.len() {
            if index < buckets.len() {
                self.start_reduction(index)?;
            }
            if let Some(earlier) = index.checked_sub(1) {
                let flat = self.finish_reduction(earlier)?;
                // While what was just reduced is in the cache.
                self.add_squares(&squares, &buckets[earlier], &flat)?;
                reduced.push(flat);
            }
        }
        if let Some(checksums) = self.reductions.checksums.take() {
            let when = "in the first step";
            self.clear();
            checksums.compare(&self.mesh, "gradient", when)?;
            self.params
                .check_copies(&self.mesh, when, |index| params.get(index).values())?;
        }
        self.clear();
        let [squares, loss_sum, num_targets] = self.sums(squares, zero, report)?;
        if num_targets < 1.0 {
            bail!("the global batch has no targets: there is nothing to learn from");
        }
        let loss = ReducedLoss {
            mean: loss_sum / num_targets,
            num_targets: num_targets as usize,
        };
        let divisor = num_targets * self.loss_scale;
        let own = buckets.iter();
        let own = own.map(|bucket| self.config.own_range(bucket, &self.mesh));
        Ok(ReducedGradients {
            own: own.collect(),
            params: self.params.clone(),
            mesh: self.mesh.clone(),
            buckets: reduced,
            whole: self
                .buckets
                .iter()
                .map(|bucket| bucket.tensor().clone())
                .collect(),
            clip: 1.0,
            scale: 1.0 / divisor,
            norm: squares.sqrt() / divisor,
            loss,
        })
    }

    /// Sums over all ranks, on the host: of squares, of losses, of targets.
    fn sums(&self, squares: Tensor, zero: Tensor, report: &PassReport) -> Result<[f64; 3]> {
        // The ranks of a replica have the same targets, and those of its last stage the same loss.
        let is_first_tp = self.mesh.tp.rank() == 0;
        let loss_sum = report.loss_sum.as_ref().filter(|_| is_first_tp);
        let loss_sum = loss_sum.map_or_else(|| Ok(zero.clone()), |sum| sum.reshape(1))?;
        let num_targets = match is_first_tp && self.mesh.pp.rank() == 0 {
            // Filled by a kernel: a copy of the host's number would wait for the GPU.
            true => zero.affine(0.0, report.num_targets as f64)?,
            false => zero,
        };
        let sums = Tensor::cat(&[squares, loss_sum, num_targets], 0)?;
        let sums = self.mesh.world.all_reduce(&sums, ReduceOp::Sum)?;
        let sums = sums.to_vec1::<f64>()?;
        // Communication on GPUs may have failed without a word until now.
        self.mesh.check()?;
        match sums.as_slice() {
            &[squares, loss, targets] => Ok([squares, loss, targets]),
            other => bail!("3 sums were expected, {} came", other.len()),
        }
    }

    /// Starts the reduction of a bucket, unless that was done.
    fn start_reduction(&mut self, index: usize) -> Result<()> {
        if self.reductions.has_started(index) {
            return Ok(());
        }
        let params = self.params.clone();
        let bucket = &params.layout().buckets[index];
        self.check_complete(bucket)?;
        let flat = &self.buckets[index];
        sum_overlaps(&params, bucket, flat, &self.mesh.tp)?;
        if let Some(tie) = bucket.tie {
            let group = &params.ties()[tie].group;
            flat.write(0, &group.all_reduce(flat.tensor(), ReduceOp::Sum)?)?;
        }
        if let Some(checksums) = &mut self.reductions.checksums {
            for slot in &bucket.slots {
                let values = flat.view(slot.range.start, slot.range.len())?;
                let values = values.reshape(params.get(slot.param).local_shape())?;
                checksums.add(&params, slot.param, &values)?;
            }
        }
        let dp = &self.mesh.dp;
        self.reductions.started[index] = Some(match self.config.zero {
            ZeroStage::Zero => dp.start_all_reduce_in_place(flat.tensor(), ReduceOp::Sum)?,
            ZeroStage::One => dp.start_reduce_scatter_in_place(flat.tensor(), ReduceOp::Sum)?,
        });
        Ok(())
    }

    /// This rank's part of a reduced bucket.
    fn finish_reduction(&mut self, index: usize) -> Result<FlatBuffer> {
        let flat = &self.buckets[index];
        let Some(started) = self.reductions.started[index].take() else {
            bail!("the reduction of bucket {index} was not started");
        };
        started.wait()?;
        let bucket = &self.params.layout().buckets[index];
        let own = self.config.own_range(bucket, &self.mesh);
        FlatBuffer::new(flat.view(own.start, own.len())?)
    }

    /// Adds to `sum` the squares of the values of a reduced bucket that this rank owns: each of the model counts on one.
    fn add_squares(&self, sum: &Tensor, bucket: &Bucket, flat: &FlatBuffer) -> Result<()> {
        if self.config.zero == ZeroStage::Zero && self.mesh.dp.rank() > 0 {
            return Ok(());
        }
        let own = self.config.own_range(bucket, &self.mesh);
        let owned = bucket.slots.iter().flat_map(|slot| {
            let start = slot.range.start;
            let owned = self.params.owned(slot.param).iter();
            owned.map(move |owned| start + owned.start..start + owned.end)
        });
        for owned in joined(owned.map(|owned| intersect(&owned, &own))) {
            let values = flat.view(owned.start - own.start, owned.len())?;
            sum_of_squares_into(sum, true, &values)?;
        }
        Ok(())
    }

    /// An error that names the first parameter of a bucket without a gradient, if there is one.
    fn check_complete(&self, bucket: &Bucket) -> Result<()> {
        let mut slots = bucket.slots.iter();
        match slots.find(|slot| !self.is_filled[slot.param]) {
            None => Ok(()),
            Some(slot) => bail!(
                "parameter {} got no gradient in this step\nhint: run the backward pass of at least one micro-batch before \
                 the optimizer",
                self.params.get(slot.param).name
            ),
        }
    }
}
