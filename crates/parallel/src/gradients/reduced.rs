//! Gradients summed over all ranks, and what is asked of them before an update.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_comm::Mesh;
use candle_core::{Result, Tensor, bail};

use super::sum_store::SumStore;
use crate::agreement::Facts;
use crate::offload::Column;
use crate::params::{FlatBuffer, Parameters, WrittenWeights};
use crate::pass::PipelineRank;
use crate::placement::intersect;

/// Gradients summed over all ranks: whole buckets (ZeRO-0) or this rank's slices of them.
pub struct ReducedGradients {
    pub(super) params: Parameters,
    pub(super) mesh: Mesh,
    pub(super) buckets: ReducedBuckets,
    /// The buffers that they are parts of, if there are any.
    pub(super) whole: Vec<Option<Tensor>>,
    /// One over the number of targets and over the loss scale.
    pub(super) scale: f64,
    /// What clipping asks for.
    pub(super) clip: f64,
    pub(super) norm: f64,
    pub(super) loss: ReducedLoss,
    pub(super) metrics: BTreeMap<String, f64>,
    pub(super) is_asked_to_stop: bool,
    pub(super) pipeline: Vec<PipelineRank>,
    /// Whether ranks have compared what they say about the update, or do not: those of asynchronous servers.
    pub(super) is_compared: bool,
}

/// This rank's part of each bucket.
pub(super) enum ReducedBuckets {
    Here(Vec<FlatBuffer>),
    Away(Arc<SumStore>),
}

impl ReducedBuckets {
    /// One to be read; what is away stays here until it is freed.
    pub fn get(&self, index: usize) -> Result<FlatBuffer> {
        match self {
            Self::Here(buckets) => Ok(buckets[index].clone()),
            Self::Away(sums) => sums.own_part(index, sums.get(index)?),
        }
    }

    /// The same of one that is looked at once.
    fn read(&self, index: usize) -> Result<FlatBuffer> {
        match self {
            Self::Here(buckets) => Ok(buckets[index].clone()),
            Self::Away(sums) => sums.own_part(index, sums.read(index)?),
        }
    }
}

/// A rank's settings of an update, which all ranks must have alike.
pub(crate) struct UpdateNotice {
    /// What all ranks must say alike.
    pub facts: Facts,
    /// Sums over weights since the last update, by which a write past `set` is found.
    pub written: Option<WrittenWeights>,
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
    /// An error on every rank if ranks say other things about the update that was not compared when these gradients were summed.
    pub(crate) fn compare(&self, update: &Facts) -> Result<()> {
        match self.is_compared {
            true => Ok(()),
            false => compare_update(&self.mesh, update),
        }
    }

    /// Global L2 norm, before clipping; each value of the model counts once.
    pub fn norm(&self) -> f64 {
        self.norm
    }

    /// The loss whose gradients these are.
    pub fn loss(&self) -> ReducedLoss {
        self.loss
    }

    /// What blocks have reported, by name: see [`Pass::report`](crate::Pass::report). The same on every rank.
    pub fn metrics(&self) -> &BTreeMap<String, f64> {
        &self.metrics
    }

    /// Whether [any rank](crate::Gradients::ask_to_stop) asks to stop after this step: the same on every rank.
    pub fn is_asked_to_stop(&self) -> bool {
        self.is_asked_to_stop
    }

    /// Of each rank of the first replica's pipeline what it did in the passes; empty without a pipeline. The same on every rank.
    pub fn pipeline(&self) -> &[PipelineRank] {
        &self.pipeline
    }

    /// What [`Self::bucket`]'s values are multiplied by to be the gradients.
    pub(crate) fn scale(&self) -> f64 {
        self.scale * self.clip
    }

    /// The buffer of a whole bucket, of which only this rank's part holds what is needed; `None` if only that part exists.
    pub(crate) fn whole_bucket(&self, index: usize) -> Option<&Tensor> {
        self.whole[index].as_ref()
    }

    /// This rank's part of bucket `index`.
    pub(crate) fn bucket(&self, index: usize) -> Result<FlatBuffer> {
        self.buckets.get(index)
    }

    /// Where sums are kept, if that is away.
    pub(crate) fn away(&self) -> Option<&Column> {
        match &self.buckets {
            ReducedBuckets::Here(_) => None,
            ReducedBuckets::Away(sums) => Some(&sums.column),
        }
    }

    /// Scales the gradients by min(1, max_norm / (norm + 1e-6)), as torch's `clip_grad_norm_` does.
    ///
    /// # Errors
    /// A `max_norm` that is not positive and finite.
    pub fn clip(&mut self, max_norm: f64) -> Result<()> {
        if !(max_norm > 0.0 && max_norm.is_finite()) {
            bail!(
                "the norm to clip gradients to is {max_norm}; expected a finite number > 0; the weights were not updated\nhint: None \
                 for no clipping"
            );
        }
        self.clip = (max_norm / (self.norm + 1e-6)).min(1.0);
        Ok(())
    }

    /// Whether loss and norm are finite: the same on every rank.
    pub fn is_finite(&self) -> bool {
        self.norm.is_finite() && self.loss.mean.is_finite()
    }

    /// An error on every rank if the loss or the norm is not finite; it names the first parameter, in name order, that has a
    /// NaN or infinite gradient. Every rank must call it.
    ///
    /// # Errors
    /// The one that it is for, and failures of ranks.
    pub fn check_finite(&self) -> Result<()> {
        if self.is_finite() {
            return Ok(());
        }
        let loss = self.loss.mean;
        let about_loss = match loss.is_finite() {
            true => String::new(),
            false => format!("the loss is {loss}: "),
        };
        let norm = self.norm;
        match self.first_non_finite()? {
            Some(name) => bail!(
                "{about_loss}the gradient norm is {norm}; the first parameter with a NaN or infinite gradient is \
                 {name}\nhint: a lower learning rate, more warm-up steps or gradient clipping may help; the weights were \
                 not updated"
            ),
            None if norm.is_finite() => bail!("{about_loss}every gradient is finite, though"),
            None => bail!(
                "{about_loss}the gradient norm is {norm} though every gradient is finite: it overflows"
            ),
        }
    }

    fn first_non_finite(&self) -> Result<Option<String>> {
        let mut first: Option<&str> = None;
        for (index, bucket) in self.params.layout().buckets.iter().enumerate() {
            let flat = self.buckets.read(index)?;
            let own = self.params.groups().own_range(bucket.len);
            for slot in &bucket.slots {
                let range = intersect(&slot.range, &own);
                let values = flat.values(range.start - own.start, range.len())?;
                let is_finite = values.iter().all(|value| value.is_finite());
                let name = self.params.get(slot.param).name.as_str();
                if !is_finite && first.is_none_or(|first| name < first) {
                    first = Some(name);
                }
            }
        }
        let first = first.unwrap_or_default().as_bytes();
        let all = self.mesh.world.all_gather_bytes(first)?;
        let names = all
            .iter()
            .map(|name| String::from_utf8_lossy(name).into_owned());
        Ok(names.filter(|name| !name.is_empty()).min())
    }

    /// For inspection: the whole local gradient of each trainable parameter, by its index. Slices are gathered
    /// over the data-parallel ranks, which all must call this.
    ///
    /// # Errors
    /// Failures of ranks.
    pub fn local_gradients(&self) -> Result<BTreeMap<usize, Tensor>> {
        let mut grads = BTreeMap::new();
        for (index, bucket) in self.params.layout().buckets.iter().enumerate() {
            let flat = self.buckets.read(index)?;
            let whole = self.params.groups().shard.all_gather(flat.tensor(), 0)?;
            for slot in &bucket.slots {
                let grad = whole.narrow(0, slot.range.start, slot.range.len())?;
                let shape = self.params.get(slot.param).local_shape();
                grads.insert(slot.param, (grad.reshape(shape)? * self.scale())?);
            }
        }
        Ok(grads)
    }
}

/// An error on every rank if ranks say other things about an update.
pub(super) fn compare_update(mesh: &Mesh, says: &Facts) -> Result<()> {
    says.compare(
        &mesh.world,
        "ranks disagree about an update",
        "every rank has the same rule with the same constants, and computes learning rate and clipping from the same numbers, such as that of \
         the step",
    )
}
