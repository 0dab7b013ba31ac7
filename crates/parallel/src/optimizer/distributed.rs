//! An optimizer under data parallelism, with its state whole on every rank (ZeRO-0) or divided over them (ZeRO-1,
//! arXiv:1910.02054). Both move 2Ψ(N−1)/N values a step over N data-parallel ranks: gradients in f32, weights in their own
//! type.

use std::ops::Range;

use candle_comm::Mesh;
use candle_core::{DType, Result, Tensor, Var, bail};

use super::loss_scaling::{LossScaler, LossScaling};
use super::master_weights::MasterWeights;
use super::{AdamW, AdamWConfig, Optimizer, ParamGroup, ParamSlice, SliceWeight, UpdateStep};
use crate::gradients::{DataParallel, Gradients, ReducedGradients, ReducedLoss, ZeroStage};
use crate::params::{BucketWeights, FlatBuffer, Parameters, intersect, offset_by};
use crate::pipeline::PassReport;

/// The optimizer of one rank: updates the rank's part of the parameters by an [`Optimizer`]'s rule, and fetches the others'.
pub struct DistributedOptimizer {
    pub(super) params: Parameters,
    mesh: Mesh,
    config: DataParallel,
    pub(super) rule: Box<dyn Optimizer>,
    groups: Vec<ParamGroup>,
    /// Of each bucket, a tensor for each of the rule's kinds of state.
    pub(super) state: Vec<Vec<Tensor>>,
    pub(super) masters: Vec<MasterWeights>,
    num_steps: usize,
    scaler: Option<LossScaler>,
}

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// The mean loss over the targets of the global batch, and their number.
    pub loss: ReducedLoss,
    /// Global L2 norm of the gradient, before clipping.
    pub grad_norm: f64,
    /// Whether loss or gradients overflowed, and nothing was updated: see [`DistributedOptimizer::with_loss_scaling`].
    pub is_skipped: bool,
}

impl DistributedOptimizer {
    /// An optimizer with the rule `rule` for the trainable ones of `params`; `config` is that of the [`Gradients`].
    ///
    /// # Errors
    /// Constants out of their range, parameters of a type that cannot be trained, and memory that is missing.
    pub fn new(
        params: &Parameters,
        mesh: &Mesh,
        config: impl Into<DataParallel>,
        rule: impl Optimizer + 'static,
    ) -> Result<Self> {
        rule.validate()?;
        if params.is_empty() {
            bail!(
                "there is no parameter to optimize on rank {}",
                mesh.world.rank()
            );
        }
        let config = config.into();
        let (mut state, mut masters) = (Vec::new(), Vec::new());
        for bucket in &params.layout().buckets {
            let own = config.own_range(bucket, mesh);
            let zeros = |_| Ok(FlatBuffer::zeros(own.len(), mesh.world.device())?.into_tensor());
            let kinds = rule.state_names().iter();
            state.push(kinds.map(zeros).collect::<Result<Vec<_>>>()?);
            masters.push(MasterWeights::new(
                params,
                bucket,
                &own,
                mesh.world.device(),
            )?);
        }
        Ok(Self {
            params: params.clone(),
            mesh: mesh.clone(),
            config,
            rule: Box::new(rule),
            groups: Vec::new(),
            state,
            masters,
            num_steps: 0,
            scaler: None,
        })
    }

    /// AdamW with these constants.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn adamw(
        params: &Parameters,
        mesh: &Mesh,
        config: impl Into<DataParallel>,
        constants: AdamWConfig,
    ) -> Result<Self> {
        Self::new(params, mesh, config, AdamW(constants))
    }

    /// The optimizer with other constants for some parameters; the first group that a parameter matches counts.
    ///
    /// # Errors
    /// A group whose numbers are out of range.
    pub fn with_groups(self, groups: Vec<ParamGroup>) -> Result<Self> {
        groups.iter().try_for_each(ParamGroup::validate)?;
        Ok(Self { groups, ..self })
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

    /// The loss scale of the next step; 1 without [`Self::with_loss_scaling`].
    pub fn loss_scale(&self) -> f64 {
        self.scaler.as_ref().map_or(1.0, LossScaler::scale)
    }

    /// Number of steps that were skipped.
    pub fn num_skipped_steps(&self) -> usize {
        self.scaler.as_ref().map_or(0, LossScaler::num_skipped)
    }

    /// Number of updates made.
    pub fn num_steps(&self) -> usize {
        self.num_steps
    }

    /// Continues the count of updates, on which AdamW's bias correction depends, for state that was
    /// [loaded](Self::load_state).
    pub fn set_num_steps(&mut self, num_steps: usize) {
        self.num_steps = num_steps;
    }

    /// Memory of the state and the master weights on this rank.
    pub fn num_bytes(&self) -> usize {
        let state = self.state.iter().flatten();
        let state = state.map(|values| values.elem_count() * values.dtype().size_in_bytes());
        let masters = self.masters.iter().map(MasterWeights::num_bytes);
        state.chain(masters).sum()
    }

    /// The part of bucket `index` that this rank updates.
    pub(super) fn own_range(&self, index: usize) -> Range<usize> {
        let bucket = &self.params.layout().buckets[index];
        self.config.own_range(bucket, &self.mesh)
    }

    /// Reduces the gradients of a step, clips them to the global norm `max_norm` and updates the parameters with learning rate
    /// `lr`. `passes` is what the step's passes returned. The gradients are cleared.
    ///
    /// # Errors
    /// A loss or norm that is not finite, unless [the step is skipped](Self::with_loss_scaling): an error on every rank, which
    /// names the first parameter to blame; nothing is updated. Else as [`Gradients::reduce`] and [`Self::apply`].
    pub fn step(
        &mut self,
        gradients: &mut Gradients,
        passes: &PassReport,
        lr: f64,
        max_norm: Option<f64>,
    ) -> Result<StepReport> {
        let mut reduced = gradients.reduce(passes)?;
        let is_finite = reduced.is_finite();
        let report = StepReport {
            loss: reduced.loss(),
            grad_norm: reduced.norm(),
            is_skipped: !is_finite && self.scaler.as_mut().is_some_and(LossScaler::shrink),
        };
        if report.is_skipped {
            return Ok(report);
        }
        reduced.check_finite().map_err(|err| match &self.scaler {
            Some(_) => err.context("the loss scale is 1 already"),
            None => err,
        })?;
        if let Some(scaler) = &mut self.scaler {
            scaler.grow();
        }
        if let Some(max_norm) = max_norm {
            reduced.clip(max_norm);
        }
        self.apply(reduced, lr)?;
        Ok(report)
    }

    /// Updates the parameters from reduced gradients, and fetches what other replicas updated. With
    /// [`DataParallel::overlap`] that goes on after the return: see there who waits for it.
    ///
    /// # Errors
    /// Gradients that were reduced in another way than this optimizer expects. After any other error some parameters are updated
    /// and others are not: the run cannot go on.
    pub fn apply(&mut self, reduced: ReducedGradients, lr: f64) -> Result<()> {
        // Weights that nobody asked for since the last update are still on their way.
        self.params.pending().wait_for_all()?;
        let params = self.params.clone();
        let layout = params.layout();
        let number = self.num_steps + 1;
        let gathers = self.config.zero == ZeroStage::One && self.mesh.dp.world_size() > 1;
        for index in layout.in_forward_order() {
            let bucket = &layout.buckets[index];
            self.update(index, &reduced, (number, lr)).map_err(|err| {
                let first = bucket.slots.first();
                let name = first.map_or("nothing", |slot| &params.get(slot.param).name);
                err.context(format!("updating the parameters from {name} on"))
            })?;
            if gathers {
                let weights = self.bucket_weights(index, &reduced)?;
                params.pending().gather(weights, &self.mesh.dp)?;
            }
            if !self.config.overlap {
                params.pending().wait_for_all()?;
            }
        }
        self.num_steps = number;
        Ok(())
    }

    /// Updates this rank's part of a bucket's parameters, group by group.
    fn update(
        &self,
        index: usize,
        reduced: &ReducedGradients,
        (number, lr): (usize, f64),
    ) -> Result<()> {
        let own = self.own_range(index);
        let (reduced_range, grad) = reduced.bucket(index);
        if *reduced_range != own {
            bail!(
                "the gradients are reduced to {reduced_range:?} of bucket {index}, and the optimizer updates {own:?}\nhint: \
                 give Gradients and DistributedOptimizer the same DataParallel"
            );
        }
        let bucket = &self.params.layout().buckets[index];
        let mut by_group: Vec<Vec<SliceWeight>> = Vec::new();
        by_group.resize_with(self.groups.len() + 1, Vec::new);
        for slot in &bucket.slots {
            let mine = intersect(&slot.range, &own);
            if mine.is_empty() {
                continue;
            }
            let param = self.params.get(slot.param);
            let group = self
                .groups
                .iter()
                .position(|group| group.matches(&param.name));
            by_group[group.unwrap_or(self.groups.len())].push(SliceWeight {
                values: param.flat_part(&offset_by(&mine, slot.range.start))?,
                start: mine.start - own.start,
                is_matrix: param.global_shape.rank() >= 2,
            });
        }
        for (group, weights) in by_group.iter().enumerate() {
            if weights.is_empty() {
                continue;
            }
            let slice = ParamSlice {
                grad: grad.tensor(),
                master: self.masters[index].tensor(),
                state: &self.state[index],
                weights,
            };
            let group = self.groups.get(group);
            let step = UpdateStep {
                number,
                lr: lr * group.map_or(1.0, |group| group.lr_scale),
                weight_decay: group.and_then(|group| group.weight_decay),
                grad_scale: reduced.scale(),
            };
            self.rule.update(&slice, &step)?;
        }
        Ok(())
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
        let gradients = reduced.whole_bucket(index);
        let dtype = weights.first().map_or(DType::F32, |(var, _)| var.dtype());
        Ok(BucketWeights {
            block: bucket.block,
            whole: match dtype == gradients.dtype() {
                true => gradients.clone(),
                false => Tensor::zeros(bucket.len, dtype, gradients.device())?,
            },
            own: self.own_range(index),
            weights,
        })
    }
}
