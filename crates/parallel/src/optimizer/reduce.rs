//! From each rank's gradients to their sum, its norm and the loss.

use std::collections::BTreeMap;

use candle_comm::{Pending, ReduceOp};
use candle_core::{DType, Result, Tensor, bail};
use candle_ops::sum_of_squares_into;

use super::{Optimizer, ZeroStage};
use crate::flat_buffer::FlatBuffer;
use crate::gradients::{Bucket, Gradients};
use crate::master_weights::{intersect, joined};

/// Gradients summed over all ranks: whole buckets (ZeRO-0) or this rank's slices of them (ZeRO-1).
pub struct ReducedGradients {
    pub(super) buckets: Vec<FlatBuffer>,
    /// What the buckets' values are multiplied by to be the gradients.
    pub(super) scale: f64,
    pub(super) norm: f64,
}

/// The loss of a step, over all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReducedLoss {
    /// Mean over the targets.
    pub mean: f64,
    /// Number of targets.
    pub num_targets: usize,
}

impl ReducedGradients {
    /// Global L2 norm, before clipping; each value of the model counts once.
    pub fn norm(&self) -> f64 {
        self.norm
    }
}

impl Optimizer {
    /// Sums the gradients over all ranks and computes their norm. The gradients are cleared; what is returned may share
    /// their buffers and must be used before the next backward pass.
    pub fn reduce(&self, gradients: &mut Gradients) -> Result<ReducedGradients> {
        Ok(self.reduce_with_loss(gradients, None, 0)?.0)
    }

    /// [`Self::reduce`] for gradients of a sum of losses: the result is the gradient of their mean, and that mean.
    ///
    /// `loss_sum` is what this rank's replica has of the sum, the f64 scalar on its device that the last stage gives, and
    /// `num_targets` the number of this replica's targets. Norm, loss and number of targets come to the host in one read: on
    /// a GPU the only time in a step that the host waits for it.
    pub fn reduce_mean(
        &self,
        gradients: &mut Gradients,
        loss_sum: Option<&Tensor>,
        num_targets: usize,
    ) -> Result<(ReducedGradients, ReducedLoss)> {
        let (mut reduced, [loss_sum, num_targets]) =
            self.reduce_with_loss(gradients, loss_sum, num_targets)?;
        if num_targets < 1.0 {
            bail!("the global batch has no targets: there is nothing to learn from");
        }
        reduced.scale = 1.0 / num_targets;
        reduced.norm *= reduced.scale;
        let loss = ReducedLoss {
            mean: loss_sum / num_targets,
            num_targets: num_targets as usize,
        };
        Ok((reduced, loss))
    }

    /// Gradients, and the sums over all ranks of the loss and the number of targets.
    fn reduce_with_loss(
        &self,
        gradients: &mut Gradients,
        loss_sum: Option<&Tensor>,
        num_targets: usize,
    ) -> Result<(ReducedGradients, [f64; 2])> {
        gradients.check_complete()?;
        gradients.sum_shared(&self.mesh)?;
        let mut buckets = Vec::with_capacity(self.layout.buckets.len());
        let zero = Tensor::zeros(1, DType::F64, self.mesh.world.device())?;
        let squares = zero.copy()?;
        // The squares are summed bucket by bucket, while what was just reduced is in the cache.
        let mut finish = |started: (&Bucket, &FlatBuffer, Pending<Tensor>)| -> Result<()> {
            let bucket = started.0;
            let flat = self.finish_reduction(started)?;
            self.add_squares(&squares, bucket, &flat)?;
            buckets.push(flat);
            Ok(())
        };
        let mut under_way = None;
        // Two buckets are under way at a time; the sums take the place of what was summed.
        for (bucket, flat) in self.layout.buckets.iter().zip(gradients.buckets()) {
            let started = self.start_reduction(flat)?;
            if let Some(earlier) = under_way.replace((bucket, flat, started)) {
                finish(earlier)?;
            }
        }
        if let Some(last) = under_way {
            finish(last)?;
        }
        gradients.clear();
        // The ranks of a replica have the same targets, and those of its last stage the same loss.
        let is_first_tp = self.mesh.tp.rank() == 0;
        let loss_sum = loss_sum.filter(|_| is_first_tp);
        let loss_sum = loss_sum.map_or_else(|| Ok(zero.clone()), |sum| sum.reshape(1))?;
        let num_targets = match is_first_tp && self.mesh.pp.rank() == 0 {
            // Filled by a kernel: a copy of the host's number would wait for the GPU.
            true => zero.affine(0.0, num_targets as f64)?,
            false => zero,
        };
        let sums = Tensor::cat(&[squares, loss_sum, num_targets], 0)?;
        let sums = self.mesh.world.all_reduce(&sums, ReduceOp::Sum)?;
        let sums = sums.to_vec1::<f64>()?;
        // Communication on GPUs may have failed without a word until now.
        self.mesh.check()?;
        let reduced = ReducedGradients {
            buckets,
            scale: 1.0,
            norm: sums[0].sqrt(),
        };
        Ok((reduced, [sums[1], sums[2]]))
    }

    fn start_reduction(&self, flat: &FlatBuffer) -> Result<Pending<Tensor>> {
        match self.zero {
            ZeroStage::Zero => self.mesh.dp.start_all_reduce(flat.tensor(), ReduceOp::Sum),
            ZeroStage::One => self
                .mesh
                .dp
                .start_reduce_scatter_in_place(flat.tensor(), ReduceOp::Sum),
        }
    }

    fn finish_reduction(
        &self,
        (bucket, flat, started): (&Bucket, &FlatBuffer, Pending<Tensor>),
    ) -> Result<FlatBuffer> {
        let own = self.own_range(bucket);
        let sum = started.wait()?;
        if self.zero == ZeroStage::Zero && self.mesh.dp.world_size() > 1 {
            flat.write(own.start, &sum)?;
        }
        FlatBuffer::new(flat.view(own.start, own.len())?)
    }

    /// Adds to `sum` the squares of the values of a reduced bucket that count on this rank: each of the model counts on one.
    fn add_squares(&self, sum: &Tensor, bucket: &Bucket, flat: &FlatBuffer) -> Result<()> {
        if self.zero == ZeroStage::Zero && self.mesh.dp.rank() > 0 {
            return Ok(());
        }
        let own = self.own_range(bucket);
        let counted = bucket.slots.iter().flat_map(|(index, range)| {
            let counted = self.params.counted(*index).iter();
            counted.map(|counted| range.start + counted.start..range.start + counted.end)
        });
        for counted in joined(counted.map(|counted| intersect(&counted, &own))) {
            let values = flat.view(counted.start - own.start, counted.len())?;
            sum_of_squares_into(sum, true, &values)?;
        }
        Ok(())
    }

    /// An error on every rank if the norm is not finite; it names the first parameter, in name order, that has a NaN or
    /// infinite gradient.
    pub fn check_finite(&self, reduced: &ReducedGradients) -> Result<()> {
        if reduced.norm.is_finite() {
            return Ok(());
        }
        let mut first: Option<&str> = None;
        for (bucket, flat) in self.layout.buckets.iter().zip(&reduced.buckets) {
            let own = self.own_range(bucket);
            for (index, range) in &bucket.slots {
                let range = intersect(range, &own);
                let values = flat.values(range.start - own.start, range.len())?;
                let is_finite = values.iter().all(|value| value.is_finite());
                let name = self.params.get(*index).name.as_str();
                if !is_finite && first.is_none_or(|first| name < first) {
                    first = Some(name);
                }
            }
        }
        let all = self
            .mesh
            .world
            .all_gather_bytes(first.unwrap_or_default().as_bytes())?;
        let names = all
            .iter()
            .map(|name| String::from_utf8_lossy(name).into_owned());
        let first = names.filter(|name| !name.is_empty()).min();
        match first {
            Some(name) => bail!(
                "the gradient norm is {}; the first parameter with a NaN or infinite gradient is {name}\nhint: a lower \
                 learning rate, more warm-up steps or gradient clipping may help; the weights were not updated",
                reduced.norm
            ),
            None => bail!(
                "the gradient norm is {} though every gradient is finite: it overflows",
                reduced.norm
            ),
        }
    }

    /// Local gradients out of reduced ones, for inspection: the whole local gradient of each trainable parameter, by its
    /// index. With ZeRO-1 the slices are gathered over the data-parallel ranks, which all must call this.
    pub fn local_gradients(&self, reduced: &ReducedGradients) -> Result<BTreeMap<usize, Tensor>> {
        let mut grads = BTreeMap::new();
        for (bucket, flat) in self.layout.buckets.iter().zip(&reduced.buckets) {
            let whole = match self.zero {
                ZeroStage::Zero => flat.tensor().clone(),
                ZeroStage::One => self.mesh.dp.all_gather(flat.tensor(), 0)?,
            };
            for (index, range) in &bucket.slots {
                let grad = whole.narrow(0, range.start, range.len())?;
                let dims = self.params.get(*index).var.dims();
                grads.insert(*index, (grad.reshape(dims)? * reduced.scale)?);
            }
        }
        Ok(grads)
    }
}
