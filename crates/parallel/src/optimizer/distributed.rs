//! An optimizer under data parallelism, with its state whole on every rank (ZeRO-0) or divided over them (ZeRO-1 to 3,
//! arXiv:1910.02054). A step of one micro-batch moves 2Ψ(N−1)/N values over N data-parallel ranks: gradients in f32, weights in
//! their own type. With ZeRO-3, which gathers weights twice, it is 3Ψ(N−1)/N.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use candle_comm::Mesh;
use candle_core::{DType, Result, Tensor, Var, bail};

use super::adamw::{AdamW, AdamWConfig};
use super::loss_scaling::{LossScaler, LossScaling};
use super::master_weights::{master_weights, part_of_own};
use super::optimizer::Optimizer;
use super::param_group::ParamGroup;
use super::rules::Rules;
use super::state_store::{BucketState, StateStore};
use crate::agreement::Facts;
use crate::gradients::{Gradients, ReducedGradients, ReducedLoss, UpdateNotice};
use crate::memory::{MemoryCategory, num_bytes};
use crate::params::{
    BucketWeights, Claim, FlatBuffer, Parameters, SaveSource, SeenWeights, gather_range, no_values,
};
use crate::pass::PipelineRank;
use crate::placement::{intersect, offset_by};

/// The optimizer of one rank: updates the rank's part of the parameters by an [`Optimizer`]'s rule, and fetches the others'.
pub struct DistributedOptimizer {
    pub(crate) params: Parameters,
    pub(crate) mesh: Mesh,
    pub(super) rules: Rules,
    pub(crate) store: StateStore,
    pub(super) num_steps: usize,
    has_diverged: bool,
    pub(super) scaler: Option<LossScaler>,
    /// Some of the weights, as the last update left them.
    seen: Option<SeenWeights>,
    /// The bucket and the place in it from which weights are seen next.
    next_seen: (usize, usize),
    /// Says that the parameters have an optimizer.
    claim: Arc<Claim>,
}

/// Weights of which a step sees whether they are what it left: as many in turn, at next to no cost.
const MAX_SEEN: usize = 1 << 20;

/// What a step did.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// The mean loss over the targets of the global batch, and their number.
    pub loss: ReducedLoss,
    /// Global L2 norm of the gradient, before clipping.
    pub grad_norm: f64,
    /// Whether loss or gradients overflowed, and nothing was updated: see [`DistributedOptimizer::with_loss_scaling`].
    pub is_skipped: bool,
    /// Whether any rank [asks to stop](Gradients::ask_to_stop) after this step. The same on every rank.
    pub is_asked_to_stop: bool,
    /// What blocks have reported, by name: see [`Pass::report`](crate::Pass::report). The same on every rank.
    pub metrics: BTreeMap<String, f64>,
    /// What each rank of the first replica's pipeline did in the step's passes; empty without a pipeline. The same on every rank.
    pub pipeline: Vec<PipelineRank>,
}

impl DistributedOptimizer {
    /// An optimizer with the rule `rule` for the trainable ones of `params`, with state and masters where the store of the parameters
    /// [says](crate::ParamStore::with_offload).
    ///
    /// # Errors
    /// Constants out of their range, parameters of a type that cannot be trained, and
    /// memory that is missing; a folder that is missing, full or may not be written to.
    pub fn new(params: &Parameters, mesh: &Mesh, rule: impl Optimizer + 'static) -> Result<Self> {
        if params.is_empty() {
            bail!(
                "there is no parameter to optimize on rank {}",
                mesh.world.rank()
            );
        }
        if params.num_trainable_values() == 0 {
            bail!(
                "all {} parameters of the model are frozen: there is nothing to train\nhint: freeze fewer names",
                params.catalog().len()
            );
        }
        let claim = params.claim_for_optimizer();
        let rules = Rules::new(Box::new(rule), Vec::new(), params)?;
        let store = new_store(params, &rules, mesh)?;
        Ok(Self {
            params: params.clone(),
            mesh: mesh.clone(),
            rules,
            store,
            num_steps: 0,
            has_diverged: false,
            scaler: None,
            seen: None,
            next_seen: (0, 0),
            claim,
        })
    }

    /// AdamW with these constants.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn adamw(params: &Parameters, mesh: &Mesh, constants: AdamWConfig) -> Result<Self> {
        Self::new(params, mesh, AdamW(constants))
    }

    /// The optimizer with other constants or rules for some parameters; the first group that a parameter matches counts. With a group that
    /// has a rule of its own all state begins anew, so groups come before state is loaded.
    ///
    /// # Errors
    /// A group whose numbers are out of range, a group without parameters, a rule that needs a matrix of a parameter that is none. Groups
    /// with rules after the first update.
    pub fn with_groups(self, groups: Vec<ParamGroup>) -> Result<Self> {
        let had_rules = self.rules.differ();
        let rules = self.rules.with_groups(groups, &self.params)?;
        if !had_rules && !rules.differ() {
            return Ok(Self { rules, ..self });
        }
        if self.num_steps > 0 {
            bail!(
                "parameter groups get rules of their own after {} updates, whose state would be lost\nhint: give the groups first, then \
                 load the state",
                self.num_steps
            );
        }
        // Before there is the other one.
        drop(self.store);
        let store = new_store(&self.params, &rules, &self.mesh)?;
        Ok(Self {
            rules,
            store,
            ..self
        })
    }

    /// The optimizer with a loss scale that changes, for models that compute in f16. A step whose loss or norm is not finite is then
    /// skipped on every rank, and [`Self::loss_scale`], which is to be given to [`Gradients::set_loss_scale`] before each step,
    /// halves. Only with a scale of 1 it is an error.
    ///
    /// # Errors
    /// Numbers out of their range.
    pub fn with_loss_scaling(self, config: LossScaling) -> Result<Self> {
        config.validate()?;
        let scaler = Some(LossScaler::new(config));
        Ok(Self { scaler, ..self })
    }

    /// Whether it was given a loss scale.
    pub fn has_loss_scaling(&self) -> bool {
        self.scaler.is_some()
    }

    /// The loss scale of the next step; 1 without [`Self::with_loss_scaling`].
    pub fn loss_scale(&self) -> f64 {
        self.scaler.as_ref().map_or(1.0, LossScaler::scale)
    }

    /// Number of steps that were skipped.
    pub fn num_skipped_steps(&self) -> usize {
        self.scaler.as_ref().map_or(0, LossScaler::num_skipped)
    }

    /// Whether the last step was an error because its loss or norm was not finite, or [was said to be](Self::set_diverged): the same on every
    /// rank, and none has failed.
    pub fn has_diverged(&self) -> bool {
        self.has_diverged
    }

    /// Says that training has diverged: for an update that was left out because its gradients were not finite, or a loss that is too large.
    /// Every rank must say so in the same step.
    pub fn set_diverged(&mut self) {
        self.has_diverged = true;
    }

    /// Number of updates made.
    pub fn num_steps(&self) -> usize {
        self.num_steps
    }

    /// Continues the count of updates, on which AdamW's bias correction depends, for state that was
    /// [loaded](Self::load_state).
    pub fn set_num_steps(&mut self, num_steps: usize) {
        self.num_steps = num_steps;
        self.params.set_num_updates(num_steps);
    }

    /// The part of bucket `index` that this rank updates.
    pub(super) fn own_range(&self, index: usize) -> Range<usize> {
        let bucket = &self.params.layout().buckets[index];
        self.params.groups().own_range(bucket.len)
    }

    /// The local values of parameter `index` in f32, as the optimizer has them: of weights in bf16 or f16 the masters, from
    /// which they are rounded. A copy, also with ZeRO-3, that later updates leave as it is, and that
    /// [`Parameters::set`] sets exactly. Every data-parallel rank must call it.
    ///
    /// # Errors
    /// Values that were [released](Parameters::release), and failures of ranks.
    pub fn values_f32(&self, index: usize) -> Result<Tensor> {
        let values = match self.master(index)? {
            Some(masters) => masters,
            None => self.params.values(index)?.to_dtype(DType::F32)?,
        };
        values.force_contiguous()
    }

    /// The local values of parameter `index` before they were rounded to its type; `None` if it is f32 or frozen. Every
    /// data-parallel rank must call it.
    pub(crate) fn master(&self, index: usize) -> Result<Option<Tensor>> {
        self.follow_set_weights()?;
        let layout = self.params.layout();
        let slot = layout.slot(index);
        let trained = slot.filter(|(bucket, ..)| *bucket < layout.buckets.len());
        let Some((bucket, whole, slot)) = trained else {
            return Ok(None);
        };
        let groups = self.params.groups();
        let slices = groups.slices(whole.len);
        let slices: Vec<_> = slices.iter().map(|s| intersect(s, &slot.range)).collect();
        let (mine, device) = (&slices[groups.shard.rank()], groups.shard.device());
        if self.store.shape(bucket).master.is_none() {
            return Ok(None);
        }
        let mut masters = Vec::new();
        if !mine.is_empty() {
            let in_own = offset_by(mine, self.own_range(bucket).start);
            self.store.read(bucket, &in_own, |part, state| {
                let of_part = intersect(mine, &part_of_own(&self.params, bucket, part));
                if let Some(kept) = state.master.as_ref().filter(|_| !of_part.is_empty()) {
                    let of_part = self.masters(bucket, part, slot, &of_part, kept)?;
                    masters.push(of_part.to_device(device)?);
                }
                Ok(())
            })?;
        }
        let own = match &masters[..] {
            [] => no_values(DType::F32, device)?,
            masters => Tensor::cat(masters, 0)?,
        };
        let values = gather_range(&slot.range, &slices, &own, &groups.shard)?;
        Ok(Some(values.reshape(self.params.get(index).local_shape())?))
    }

    /// Reduces the gradients of a step, clips them to the global norm `max_norm` and updates the parameters with learning rate
    /// `lr`. The gradients are cleared.
    ///
    /// # Errors
    /// A loss or norm that is not finite, unless [the step is skipped](Self::with_loss_scaling): an error on every rank, which
    /// names the first parameter to blame; nothing is updated. Gradients of another model, ranks that give other numbers than these, a
    /// learning rate that is negative or not finite, a `max_norm` that is not positive and finite. Else as [`Gradients::reduce`] and
    /// [`Self::apply`].
    pub fn step(
        &mut self,
        gradients: &mut Gradients,
        lr: f64,
        max_norm: Option<f64>,
    ) -> Result<StepReport> {
        gradients.check_are_of(&self.params)?;
        let written = match self.seen.take() {
            Some(seen) => self.params.written_since(&seen)?,
            None => None,
        };
        let update = UpdateNotice {
            facts: self.update_facts(lr, max_norm),
            written,
        };
        let reduced = gradients.reduce_for(Some(&update))?;
        let report = self.step_reduced(reduced, lr, max_norm)?;
        self.see_weights()?;
        Ok(report)
    }

    /// Remembers some of the weights for the next step, others each time.
    fn see_weights(&mut self) -> Result<()> {
        let (bucket, start) = self.next_seen;
        let num_buckets = self.params.layout().buckets.len();
        if num_buckets == 0 {
            return Ok(());
        }
        let len = self.own_range(bucket).len();
        let end = len.min(start + MAX_SEEN);
        self.next_seen = if end == len {
            ((bucket + 1) % num_buckets, 0)
        } else {
            (bucket, end)
        };
        self.seen = self.params.see_weights(bucket, start..end)?;
        Ok(())
    }

    /// What all ranks must say alike of an update.
    fn update_facts(&self, lr: f64, max_norm: Option<f64>) -> Facts {
        let mut facts = Facts::default();
        let [rule, groups] = self.rules.described();
        facts.add("the optimizer's rule", rule);
        facts.add("the number of the update", self.num_steps + 1);
        facts.add("the learning rate", lr);
        facts.add("the groups of parameters", groups);
        facts.add("the norm to clip to", format!("{max_norm:?}"));
        facts
    }

    /// As [`Self::step`], from gradients that are reduced.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub fn step_reduced(
        &mut self,
        mut reduced: ReducedGradients,
        lr: f64,
        max_norm: Option<f64>,
    ) -> Result<StepReport> {
        reduced.compare(&self.update_facts(lr, max_norm))?;
        let is_finite = reduced.is_finite();
        let report = StepReport {
            loss: reduced.loss(),
            grad_norm: reduced.norm(),
            is_asked_to_stop: reduced.is_asked_to_stop(),
            metrics: reduced.metrics().clone(),
            pipeline: reduced.pipeline().to_vec(),
            is_skipped: !is_finite && self.scaler.as_mut().is_some_and(LossScaler::shrink),
        };
        if report.is_skipped {
            return Ok(report);
        }
        self.has_diverged = !is_finite;
        reduced.check_finite().map_err(|err| match &self.scaler {
            Some(_) => err.context("the loss scale is 1 already"),
            None => err,
        })?;
        if let Some(scaler) = &mut self.scaler {
            scaler.grow();
        }
        if let Some(max_norm) = max_norm {
            reduced.clip(max_norm)?;
        }
        self.apply(reduced, lr)?;
        Ok(report)
    }

    /// Before an update.
    pub(crate) fn begin_update(&self) -> Result<()> {
        self.params.claim_update(&self.claim)?;
        // Weights that nobody asked for since the last update may be on their way; the list of the update counts them.
        self.params.pending().wait_for_all()?;
        self.follow_set_weights()?;
        self.params.note_write();
        let slots = self
            .params
            .layout()
            .buckets
            .iter()
            .flat_map(|bucket| &bucket.slots);
        slots.for_each(|slot| self.params.set_save_source(slot.param, SaveSource::Update));
        Ok(())
    }

    /// After an update.
    pub(crate) fn end_update(&mut self) {
        self.set_num_steps(self.num_steps + 1);
        self.params.forget_set();
    }

    /// Starts to gather the updated weights of bucket `index`, of which this rank's slice is up to date, for all ranks.
    pub(crate) fn spread_weights(&self, index: usize, reduced: &ReducedGradients) -> Result<()> {
        let weights = self.bucket_weights(index, reduced)?;
        (self.params.pending()).gather(weights, &self.params.groups().shard)
    }

    /// A bucket's weights, of which this rank's slice is up to date.
    fn bucket_weights(&self, index: usize, reduced: &ReducedGradients) -> Result<BucketWeights> {
        let bucket = &self.params.layout().buckets[index];
        let weights = bucket.slots.iter();
        let weights = weights.map(|slot| {
            let var = self.params.get(slot.param).var().clone();
            (var, slot.range.clone())
        });
        let weights: Vec<(Var, Range<usize>)> = weights.collect();
        let (whole, staging) = match reduced.whole_bucket(index) {
            Some(gradients) if bucket.dtype == gradients.dtype() => (gradients.clone(), None),
            _ => {
                let device = self.params.groups().shard.device();
                let whole = Tensor::zeros(bucket.len, bucket.dtype, device)?;
                let meter = self.params.meter();
                let staging = meter.hold(MemoryCategory::Buffers, num_bytes(&whole));
                (whole, Some(staging))
            }
        };
        Ok(BucketWeights {
            block: bucket.block,
            whole,
            staging,
            own: self.own_range(index),
            weights,
        })
    }
}

/// State of zeros and masters of the weights, where the parameters' store says.
fn new_store(params: &Parameters, rules: &Rules, mesh: &Mesh) -> Result<StateStore> {
    let (layout, device) = (params.layout(), mesh.world.device());
    let shapes = (0..layout.buckets.len()).map(|index| rules.shape(index, params));
    let initial = |index: usize, part: &Range<usize>| {
        let shape = rules.shape(index, params)?;
        let kinds = shape.tensors_of(part).into_iter().take(shape.kinds.len());
        let zeros = |(len, _)| Ok(FlatBuffer::zeros(len, device)?.into_tensor());
        let masters = |dtype| {
            let masters = || master_weights(params, index, part, dtype, device);
            match dtype {
                // What the weights have of them is a part of the weights.
                DType::I16 => params.change_weights(index, masters),
                _ => masters(),
            }
        };
        Ok(BucketState {
            state: kinds.map(zeros).collect::<Result<_>>()?,
            master: shape.master.map(masters).transpose()?,
        })
    };
    let offload = params.offload();
    let place = offload.place_of_optimizer(mesh.world.rank(), !device.is_cpu());
    let shapes = shapes.collect::<Result<_>>()?;
    let (update_values, meter) = (offload.update_values, params.meter());
    StateStore::new(place, update_values, device, meter, shapes, initial)
}
