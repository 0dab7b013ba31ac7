//! The gradients that a step accumulates over its micro-batches.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use candle_comm::Mesh;
use candle_core::{DType, Result, Tensor, TensorId, bail};

use super::reduce::{NUM_COMPARED, Reductions};
use super::sum_store::SumStore;
use crate::checksums::{Checksums, Shared};
use crate::memory::MemoryCategory;
use crate::offload::Column;
use crate::params::{FlatBuffer, Parameters};
use crate::pass::{GradientSink, Occupation, PassReport, Reported, SeenRegions, WeightGrad};

/// Gradients of the trainable parameters of a rank, in f32, in flat buckets.
///
/// A backward pass adds to them; when a bucket's blocks have done so for all micro-batches, the bucket is reduced over the mesh,
/// while the backward passes of earlier blocks run: see [`DataParallel::overlap`](crate::DataParallel::overlap). From
/// [`ZeroStage::Two`](crate::ZeroStage::Two) on that is done for each micro-batch, and a whole bucket exists only meanwhile.
pub struct Gradients {
    pub(crate) params: Parameters,
    pub(super) mesh: Mesh,
    /// Sums over micro-batches: of whole buckets, those of tied parameters once for each stage that uses them, or of this rank's slices.
    pub(super) sums: Arc<SumStore>,
    /// Whole buckets of those that are divided, while they are written to.
    pub(super) whole: Vec<Option<FlatBuffer>>,
    /// Of each bucket the parameters whose places in it hold a gradient.
    pub(super) filled: Vec<HashSet<usize>>,
    /// Whether a parameter got a gradient in this step.
    pub(super) has_gradient: Vec<bool>,
    places: HashMap<TensorId, usize>,
    pub(super) reductions: Reductions,
    pub(super) loss_scale: f64,
    pub(super) totals: Totals,
    pub(super) first_steps: FirstSteps,
    /// Whether ranks that report other numbers were told of.
    pub(super) has_warned_of_reports: bool,
}

/// The comparisons of the first steps between tensor-parallel ranks.
#[derive(Default)]
pub(super) struct FirstSteps {
    /// What left each block that all tensor-parallel ranks share, in the steps in which it is compared.
    pub(super) borders: Option<Checksums>,
    /// Steps whose borders were compared.
    pub(super) num_compared: usize,
    /// By pass, block and order of the call, the steps in which each rank had the whole of what a region sums; `None`
    /// if one had a summand.
    steps_of_wholes: HashMap<(&'static str, usize, usize), Option<HashSet<usize>>>,
}

/// What the passes of a step have counted on this rank.
#[derive(Clone, Default)]
pub(super) struct Totals {
    /// Sum of the losses; on the last stage alone.
    pub loss_sum: Option<Tensor>,
    /// Number of the targets of these losses, on the rank that has them.
    pub num_targets: f64,
    /// What was said instead: see [`Gradients::set_num_targets`].
    pub said_targets: Option<f64>,
    pub asks_to_stop: bool,
    /// What blocks have reported, by name.
    pub reported: BTreeMap<String, Reported>,
    /// A hash of how many collectives of tensor-parallel ranks each pass of a block made.
    pub collectives: u64,
    /// Sums of squares, of how far this rank's sums of copies' gradients were from the first rank's, and of those; where ranks need not
    /// come to the same bits.
    pub distance: Option<[Tensor; 2]>,
    pub occupation: Option<Occupation>,
}

impl Gradients {
    /// Buffers for the gradients of `params`.
    ///
    /// # Errors
    /// Memory that is missing.
    pub fn new(params: &Parameters, mesh: &Mesh) -> Result<Self> {
        let num_buckets = params.layout().num_gradient_buckets();
        Ok(Self {
            sums: Arc::new(SumStore::new(params, mesh)?),
            whole: vec![None; num_buckets],
            filled: vec![HashSet::new(); num_buckets],
            has_gradient: vec![false; params.len()],
            places: params
                .iter()
                .enumerate()
                .map(|(index, param)| (param.id(), index))
                .collect(),
            reductions: Reductions::new(num_buckets, params.len()),
            params: params.clone(),
            mesh: mesh.clone(),
            loss_scale: 1.0,
            totals: Totals::default(),
            first_steps: FirstSteps {
                borders: (mesh.tp.world_size() > 1).then(Checksums::default),
                ..FirstSteps::default()
            },
            has_warned_of_reports: false,
        })
    }

    /// Asks all ranks to stop after this step: see [`StepReport::is_asked_to_stop`](crate::StepReport::is_asked_to_stop).
    pub fn ask_to_stop(&mut self) {
        self.totals.asks_to_stop = true;
    }

    /// Has the step's gradients divided by the sum of these numbers over the replicas, and not by that of their targets, for a loss that
    /// is no sum over targets: by pairs of answers, for example. Each rank of a replica says the same; said after the step's passes.
    pub fn set_num_targets(&mut self, num_targets: usize) {
        self.totals.said_targets = Some(num_targets as f64);
    }

    /// Adds what a call of [`Pipeline::forward_backward`](crate::Pipeline::forward_backward) has counted.
    pub(crate) fn add_passes(&mut self, passes: &PassReport) -> Result<()> {
        let totals = &mut self.totals;
        totals.num_targets += passes.num_targets;
        totals.loss_sum = match (totals.loss_sum.take(), &passes.loss_sum) {
            (Some(sum), Some(loss)) => Some((sum + loss)?),
            (sum, loss) => sum.or(loss.clone()),
        };
        for (name, reported) in &passes.reported {
            let known = totals.reported.entry(name.clone()).or_default();
            *known = known.plus(*reported);
        }
        let occupation = [totals.occupation, passes.occupation].into_iter();
        totals.occupation = occupation.flatten().reduce(Occupation::plus);
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
        match &mut self.first_steps.borders {
            None => Ok(()),
            Some(borders) => borders.add(what, borders.len(), values),
        }
    }

    /// Whether this step's regions are to be [watched](crate::pass::watched).
    pub(crate) fn watches_regions(&self) -> bool {
        self.first_steps.borders.is_some()
    }

    /// Notes what was seen of regions in a pass of a block, in the first steps.
    ///
    /// # Errors
    /// A sum to which each rank has added the whole in all of these steps.
    pub(crate) fn note_regions(
        &mut self,
        (pass, block): (&'static str, usize),
        seen: SeenRegions,
    ) -> Result<()> {
        let Some(borders) = &mut self.first_steps.borders else {
            return Ok(());
        };
        for sum in seen.entered {
            borders.note(Shared::RegionInput(block), borders.len(), sum);
        }
        for (place, sum) in seen.sums.into_iter().enumerate() {
            let Some(is_whole) = sum.is_each_the_whole else {
                continue;
            };
            let steps = self.first_steps.steps_of_wholes.entry((pass, block, place));
            let steps = steps.or_insert_with(|| Some(HashSet::new()));
            if !is_whole {
                *steps = None;
            }
            let Some(steps) = steps else { continue };
            steps.insert(self.first_steps.num_compared);
            let num_ranks = self.mesh.tp.world_size();
            if steps.len() == NUM_COMPARED {
                bail!(
                    "{} is the same on all {num_ranks} tensor-parallel ranks in the first {NUM_COMPARED} steps, in the {pass} of block {block}, though it \
                     should be a summand on each: the sum is {num_ranks} times too large\nhint: a region is entered once \
                     (copy_to_tensor_parallel_region, ColumnParallelLinear), and left once (reduce_from_tensor_parallel_region, \
                     RowParallelLinear), whose result all ranks have",
                    sum.what
                );
            }
        }
        Ok(())
    }

    /// An error unless these are gradients of `params`.
    pub(crate) fn check_are_of(&self, params: &Parameters) -> Result<()> {
        if self.params.are_those_of(params) {
            return Ok(());
        }
        bail!(
            "the gradients were made for the parameters of another model\nhint: each model has Gradients and an optimizer of its \
             own, made from its own ModelPart::params"
        )
    }

    /// Makes a whole bucket, to be divided; what is there stays.
    pub(crate) fn make_whole(&mut self, bucket: usize) -> Result<()> {
        if self.whole[bucket].is_none() {
            let len = self.params.layout().gradient_bucket(bucket).len;
            let zeros = FlatBuffer::zeros(len, self.mesh.world.device())?;
            let zeros = zeros.counted(self.params.meter(), MemoryCategory::Buffers);
            self.whole[bucket] = Some(zeros);
        }
        Ok(())
    }

    /// The buffer of a whole bucket, to be written to.
    fn buffer(&mut self, bucket: usize) -> Result<FlatBuffer> {
        self.reductions.is_settled[bucket] = false;
        if self.sums.is_divided {
            self.make_whole(bucket)?;
        }
        match &self.whole[bucket] {
            Some(whole) => Ok(whole.clone()),
            None => self.sum(bucket),
        }
    }

    /// Starts to fetch the sum of a bucket.
    pub(crate) fn fetch_sum(&self, bucket: usize) -> Result<()> {
        self.begin_sum(bucket);
        self.sums.column.fetch(bucket)
    }

    /// The sum of a bucket, to be written to.
    pub(super) fn sum(&self, bucket: usize) -> Result<FlatBuffer> {
        self.begin_sum(bucket);
        self.sums.get(bucket)
    }

    /// Has nothing read for a sum that has no values of this step: neither this rank's, nor those of others or of earlier passes.
    fn begin_sum(&self, bucket: usize) {
        let sums = &self.reductions;
        if self.filled[bucket].is_empty() && !sums.has_sum[bucket] && !sums.is_settled[bucket] {
            self.sums.column.blank(bucket);
        }
    }

    /// What was written to a whole bucket, if it exists on this rank.
    pub(super) fn written(&self, bucket: usize) -> Result<Option<FlatBuffer>> {
        match &self.whole[bucket] {
            Some(whole) => Ok(Some(whole.clone())),
            None if self.sums.is_divided => Ok(None),
            None => self.sums.read(bucket).map(Some),
        }
    }

    /// Where sums are kept between their uses.
    pub(crate) fn column(&self) -> &Column {
        &self.sums.column
    }

    /// Multiplies the gradient of the loss by `scale`, a power of two, from the next step's passes on. [`Self::reduce`] divides by it.
    pub fn set_loss_scale(&mut self, scale: f64) {
        self.loss_scale = scale;
    }

    /// The factor of the gradients that passes add.
    pub fn loss_scale(&self) -> f64 {
        self.loss_scale
    }

    /// Whether what is written of a bucket is to be whole after one half of a backward pass, as it is divided or goes away then.
    pub(crate) fn come_once(&self) -> bool {
        self.sums.is_divided || self.column().is_away()
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
        let is_filled = self.filled[bucket].contains(&index);
        let whole = self.buffer(bucket)?;
        match is_filled {
            false => whole.write(offset, grad)?,
            true => whole.add(offset, grad)?,
        }
        self.mark_written(bucket, index);
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
        let mut sum: Option<Tensor> = None;
        for stage in self.params.layout().stages_of(bucket) {
            if self.filled[stage].contains(&index)
                && let Some(whole) = self.written(stage)?
            {
                let values = whole.view(offset, param.num_values())?;
                sum = Some(match sum {
                    None => values,
                    Some(sum) => (sum + values)?,
                });
            }
        }
        match sum {
            Some(sum) => sum.reshape(param.local_shape()),
            None => bail!(
                "parameter {} has no gradient on this rank alone: none was written, or replicas have divided it (ZeRO-2, \
                 ZeRO-3)",
                param.name
            ),
        }
    }

    /// Writes zeros to the places of a whole bucket that hold no gradient of these passes, and between parameters where their blocks share a
    /// scale: a buffer is used again for other values.
    pub(super) fn write_missing(&self, index: usize, whole: &FlatBuffer) -> Result<()> {
        let bucket = self.params.layout().gradient_bucket(index);
        let is_quantized = (self.params.groups().reduce_type(bucket))
            .quantized()
            .is_some();
        let mut end = 0;
        for slot in &bucket.slots {
            if is_quantized {
                write_zeros(whole, end..slot.range.start)?;
            }
            if !self.filled[index].contains(&slot.param) {
                write_zeros(whole, slot.range.clone())?;
            }
            end = slot.range.end;
        }
        if is_quantized {
            write_zeros(whole, end..bucket.len)?;
        }
        Ok(())
    }

    fn mark_written(&mut self, bucket: usize, index: usize) {
        self.filled[bucket].insert(index);
        self.has_gradient[index] = true;
    }

    /// The parameter that is this variable.
    ///
    /// # Errors
    /// It is none of this rank's parameters: no optimizer would update it, and it would be in no file.
    pub(crate) fn index_of(&self, weight: &Tensor) -> Result<usize> {
        match self.places.get(&weight.id()) {
            Some(index) => Ok(*index),
            None => bail!(
                "the block uses a variable of shape {:?} that is no parameter of this model: it would never be trained, and be in no \
                 file\nhint: ask the block's ParamBuilder for it; what shall not be trained is a plain tensor \
                 (Var::as_detached_tensor), or a frozen parameter",
                weight.shape()
            ),
        }
    }

    /// Forgets what was accumulated; the buffers stay.
    pub fn clear(&mut self) {
        self.totals = Totals::default();
        self.first_steps
            .borders
            .iter_mut()
            .for_each(Checksums::clear);
        self.reductions.clear();
        self.filled.iter_mut().for_each(HashSet::clear);
        self.has_gradient.fill(false);
        self.whole.fill(None);
        self.sums.column.clear();
    }

    fn check_not_reduced(&self, bucket: usize, index: usize) -> Result<()> {
        // Updated weights may still pass through the buffer.
        let block = self.params.layout().gradient_bucket(bucket).block;
        self.params.pending().wait_for_block(block)?;
        if self.reductions.has_begun[bucket] {
            bail!(
                "the gradient of parameter {} is read or written after its reduction over the ranks has begun, which it does when \
                 the blocks that asked for it have computed their gradients for all micro-batches\nhint: a block that uses the parameter asks for it by \
                 ParamBuilder::tied; to read gradients before they are reduced use DataParallel {{ overlap: false, .. }}",
                self.params.get(index).name
            );
        }
        Ok(())
    }
}

impl Gradients {
    /// Takes the gradients of a stage: of a parameter that several stages of this rank use, each has a sum of its own.
    pub(crate) fn of_stage(&mut self, stage: usize) -> StageGradients<'_> {
        StageGradients {
            gradients: self,
            stage: Some(stage),
        }
    }

    fn put_of(&mut self, stage: Option<usize>, weight: &Tensor, grad: WeightGrad) -> Result<()> {
        if !weight.track_op() {
            return Ok(());
        }
        let index = self.index_of(weight)?;
        let params = self.params.clone();
        let Some((bucket, offset)) = params.layout().place(index) else {
            return Ok(());
        };
        let bucket = params.layout().of_stage(bucket, stage);
        self.check_not_reduced(bucket, index)?;
        let (len, add) = (weight.elem_count(), self.filled[bucket].contains(&index));
        grad(&self.buffer(bucket)?.view(offset, len)?, add)?;
        self.mark_written(bucket, index);
        Ok(())
    }
}

/// The gradients that a stage of this rank gives.
pub(crate) struct StageGradients<'a> {
    gradients: &'a mut Gradients,
    stage: Option<usize>,
}

impl GradientSink for StageGradients<'_> {
    fn put(&mut self, weight: &Tensor, grad: WeightGrad) -> Result<()> {
        self.gradients.put_of(self.stage, weight, grad)
    }

    fn name_of(&self, weight: &Tensor) -> Option<String> {
        self.gradients.name_of(weight)
    }
}

impl GradientSink for Gradients {
    fn put(&mut self, weight: &Tensor, grad: WeightGrad) -> Result<()> {
        self.put_of(None, weight, grad)
    }

    fn name_of(&self, weight: &Tensor) -> Option<String> {
        let index = self.places.get(&weight.id())?;
        Some(self.params.get(*index).name.clone())
    }
}

fn write_zeros(flat: &FlatBuffer, range: Range<usize>) -> Result<()> {
    // A GPU allocates no 0 bytes.
    if range.is_empty() {
        return Ok(());
    }
    let zeros = Tensor::zeros(range.len(), DType::F32, flat.tensor().device())?;
    flat.write(range.start, &zeros)
}
