//! The gradients that a step accumulates over its micro-batches.

use std::collections::HashMap;

use candle_comm::Mesh;
use candle_core::{Result, Tensor, TensorId, bail};

use super::reduce::Reductions;
use crate::checksums::{Checksums, Shared};
use crate::layers::GradientSink;
use crate::memory::MemoryCategory;
use crate::params::{FlatBuffer, Parameters};

/// Gradients of the trainable parameters of a stage, in f32, in flat buckets.
///
/// A backward pass adds to them; when the last micro-batch's has left a bucket's blocks, the bucket is reduced over the mesh,
/// while the backward passes of earlier blocks run: see [`DataParallel::overlap`](crate::DataParallel::overlap). From
/// [`ZeroStage::Two`](crate::ZeroStage::Two) on that is done for each micro-batch, and a whole bucket exists only meanwhile.
pub struct Gradients {
    pub(super) params: Parameters,
    pub(super) mesh: Mesh,
    /// Whole buckets; `None` while nothing was written to one that is divided.
    pub(super) whole: Vec<Option<FlatBuffer>>,
    /// Of divided buckets this rank's slices, in which micro-batches are summed.
    pub(super) slices: Vec<FlatBuffer>,
    /// Whether a parameter's place in its whole bucket holds a gradient.
    pub(super) is_filled: Vec<bool>,
    /// Whether a parameter got a gradient in this step.
    pub(super) has_gradient: Vec<bool>,
    /// How often each parameter's gradient was written to.
    num_writes: Vec<usize>,
    index_of: HashMap<TensorId, usize>,
    pub(super) reductions: Reductions,
    pub(super) loss_scale: f64,
    pub(super) totals: Totals,
    /// What left each block that all tensor-parallel ranks share, in the steps in which it is compared.
    pub(super) borders: Option<Checksums>,
    /// Steps whose borders were compared.
    pub(super) num_compared: usize,
}

/// What the passes of a step have counted on this rank.
#[derive(Clone, Default)]
pub(super) struct Totals {
    /// Sum of the losses; on the last stage alone.
    pub loss_sum: Option<Tensor>,
    /// Number of the replica's targets.
    pub num_targets: f64,
    pub asks_to_stop: bool,
    /// A hash of how many collectives of tensor-parallel ranks each pass of a block made.
    pub collectives: u64,
    /// Sums of squares, of how far this rank's sums of copies' gradients were from the first rank's, and of those; where ranks need not
    /// come to the same bits.
    pub distance: Option<[Tensor; 2]>,
}

impl Gradients {
    /// Buffers for the gradients of `params`.
    ///
    /// # Errors
    /// Memory that is missing.
    pub fn new(params: &Parameters, mesh: &Mesh) -> Result<Self> {
        let (groups, meter) = (params.groups(), params.meter());
        let is_divided = groups.shards_gradients();
        let buckets = &params.layout().buckets;
        let zeros = |len| {
            let zeros = FlatBuffer::zeros(len, mesh.world.device())?;
            Ok(zeros.counted(meter, MemoryCategory::Gradients))
        };
        let whole = buckets.iter().map(|bucket| match is_divided {
            true => Ok(None),
            false => zeros(bucket.len).map(Some),
        });
        let slices = buckets.iter().filter(|_| is_divided);
        let slices = slices.map(|bucket| zeros(groups.own_range(bucket.len).len()));
        Ok(Self {
            whole: whole.collect::<Result<_>>()?,
            slices: slices.collect::<Result<_>>()?,
            is_filled: vec![false; params.len()],
            has_gradient: vec![false; params.len()],
            num_writes: vec![0; params.len()],
            index_of: params
                .iter()
                .enumerate()
                .map(|(index, param)| (param.id(), index))
                .collect(),
            reductions: Reductions::new(buckets.len(), params.len()),
            params: params.clone(),
            mesh: mesh.clone(),
            loss_scale: 1.0,
            totals: Totals::default(),
            borders: (mesh.tp.world_size() > 1).then(Checksums::default),
            num_compared: 0,
        })
    }

    /// Asks all ranks to stop after this step: see [`StepReport::is_asked_to_stop`](crate::StepReport::is_asked_to_stop).
    pub fn ask_to_stop(&mut self) {
        self.totals.asks_to_stop = true;
    }

    /// Has the step's gradients divided by the sum of these numbers over the replicas, and not by that of their targets, for a loss that
    /// is no sum over targets: by pairs of answers, for example. Each rank of a replica says the same; said after the step's passes.
    pub fn set_num_targets(&mut self, num_targets: usize) {
        self.totals.num_targets = num_targets as f64;
    }

    /// Adds what a call of [`Pipeline::forward_backward`](crate::Pipeline::forward_backward) has counted.
    pub(crate) fn add_passes(
        &mut self,
        loss_sum: Option<&Tensor>,
        num_targets: usize,
    ) -> Result<()> {
        let totals = &mut self.totals;
        totals.num_targets += num_targets as f64;
        totals.loss_sum = match (totals.loss_sum.take(), loss_sum) {
            (Some(sum), Some(loss)) => Some((sum + loss)?),
            (sum, loss) => sum.or(loss.cloned()),
        };
        Ok(())
    }

    /// Counts the collectives of a block's pass that all tensor-parallel ranks must make.
    pub(crate) fn count_collectives(&mut self, number: u64) {
        let earlier = self.totals.collectives;
        self.totals.collectives = earlier.wrapping_mul(31).wrapping_add(number + 1);
    }

    /// Notes, in the first steps, what left a block that all tensor-parallel ranks share: so that, if they do not, the block is named, and
    /// not only the parameters before it.
    pub(crate) fn note_border(&mut self, what: Shared, values: &Tensor) -> Result<()> {
        match &mut self.borders {
            None => Ok(()),
            Some(borders) => borders.add(what, borders.len(), values),
        }
    }

    /// An error unless these are gradients of `params`.
    pub(crate) fn check_are_of(&self, params: &Parameters) -> Result<()> {
        if self.params.are_those_of(params) {
            return Ok(());
        }
        bail!(
            "the gradients were made for the parameters of another model\nhint: each model has Gradients and an optimizer of its \
             own, made from its own Stage::params"
        )
    }

    /// The buffer of a whole bucket, made if there is none.
    fn whole(&mut self, bucket: usize) -> Result<&FlatBuffer> {
        let whole = &mut self.whole[bucket];
        match whole {
            Some(flat) => Ok(flat),
            None => {
                let len = self.params.layout().buckets[bucket].len;
                let zeros = FlatBuffer::zeros(len, self.mesh.world.device())?;
                Ok(whole.insert(zeros.counted(self.params.meter(), MemoryCategory::Buffers)))
            }
        }
    }

    /// Multiplies the gradient of the loss by `scale`, a power of two, from the next step's passes on. [`Self::reduce`] divides by it.
    pub fn set_loss_scale(&mut self, scale: f64) {
        self.loss_scale = scale;
    }

    /// The factor of the gradients that passes add.
    pub fn loss_scale(&self) -> f64 {
        self.loss_scale
    }

    /// Adds `grad` to the gradient of parameter `index`, in f32. candle's graph gives gradients in the type of the parameter,
    /// so rounded once a micro-batch if that has 16 bits; what a [`crate::Layer`] writes is never rounded.
    ///
    /// # Errors
    /// A gradient of another shape than the parameter, and a parameter that is frozen.
    pub fn accumulate(&mut self, index: usize, grad: &Tensor) -> Result<()> {
        let param = self.params.get(index);
        if grad.dims() != param.local_shape().dims() {
            bail!(
                "the gradient of {} has shape {:?}; expected that of the parameter, {:?}",
                param.name,
                grad.shape(),
                param.local_shape()
            );
        }
        let Some((bucket, offset)) = self.params.layout().place(index) else {
            bail!("parameter {} is frozen: it takes no gradient", param.name);
        };
        self.check_not_reduced(bucket, index)?;
        let is_filled = self.is_filled[index];
        let whole = self.whole(bucket)?;
        match is_filled {
            false => whole.write(offset, grad)?,
            true => whole.add(offset, grad)?,
        }
        self.mark_written(index);
        Ok(())
    }

    /// The gradient accumulated on this rank for parameter `index`, in the parameter's local shape.
    ///
    /// # Errors
    /// The parameter has none, or its bucket has been reduced.
    pub fn get(&self, index: usize) -> Result<Tensor> {
        let param = self.params.get(index);
        let Some((bucket, offset)) = self.params.layout().place(index) else {
            bail!("parameter {} is frozen: it has no gradient", param.name);
        };
        self.check_not_reduced(bucket, index)?;
        match &self.whole[bucket] {
            Some(whole) if self.is_filled[index] => {
                let values = whole.view(offset, param.num_values())?;
                values.reshape(param.local_shape())
            }
            _ => bail!(
                "parameter {} has no gradient on this rank alone: none was written, or replicas have divided it (ZeRO-2, \
                 ZeRO-3)",
                param.name
            ),
        }
    }

    fn mark_written(&mut self, index: usize) {
        self.is_filled[index] = true;
        self.has_gradient[index] = true;
        self.num_writes[index] += 1;
    }

    /// How often the gradients of these parameters have been written to so far.
    pub(crate) fn num_writes(&self, indices: &[usize]) -> Vec<usize> {
        let writes = indices.iter().map(|&index| self.num_writes[index]);
        writes.collect()
    }

    /// The parameter that is the variable with this identity, if one is.
    pub(crate) fn param_of(&self, id: TensorId) -> Option<usize> {
        self.index_of.get(&id).copied()
    }

    /// Forgets what was accumulated; the buffers stay.
    pub fn clear(&mut self) {
        self.totals = Totals::default();
        self.borders.iter_mut().for_each(Checksums::clear);
        self.reductions.clear();
        self.is_filled.fill(false);
        self.has_gradient.fill(false);
        if !self.slices.is_empty() {
            self.whole.fill(None);
        }
    }

    fn check_not_reduced(&self, bucket: usize, index: usize) -> Result<()> {
        // Updated weights may still pass through the buffer.
        let block = self.params.layout().buckets[bucket].block;
        self.params.pending().wait_for_block(block)?;
        if self.reductions.has_started(bucket) {
            bail!(
                "the gradient of parameter {} is read or written after its reduction over the ranks has begun, which it does when the \
                 backward pass of the first block that asked for it is over\nhint: a block that uses the parameter asks for it by \
                 ParamBuilder::tied; to read gradients before they are reduced use DataParallel {{ overlap: false, .. }}",
                self.params.get(index).name
            );
        }
        Ok(())
    }
}

impl GradientSink for Gradients {
    fn write(
        &mut self,
        weight: &Tensor,
        write: &mut dyn FnMut(&Tensor, bool) -> Result<()>,
    ) -> Result<()> {
        if !weight.track_op() {
            return Ok(());
        }
        let Some(&index) = self.index_of.get(&weight.id()) else {
            bail!(
                "a weight of shape {:?} is trainable but none of this stage's parameters",
                weight.shape()
            );
        };
        if let Some((bucket, offset)) = self.params.layout().place(index) {
            self.check_not_reduced(bucket, index)?;
            let (len, add) = (weight.elem_count(), self.is_filled[index]);
            write(&self.whole(bucket)?.view(offset, len)?, add)?;
            self.mark_written(index);
        }
        Ok(())
    }
}
