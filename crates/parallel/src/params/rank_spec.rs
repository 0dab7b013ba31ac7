//! What one rank holds of a model, by arithmetic: parts, what it owns and shares, ties, and where everything lies in buckets.

use std::ops::Range;

use candle_core::{DType, Result, bail};

use super::layout::{ParamLayout, Sharing};
use super::param::Param;
use super::tie::TieSpec;
use crate::pipeline_layout::PipelineLayout;
use crate::placement::{Gradient, HeldRange, Indices};

/// What one rank holds of a model: numbers, no values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankSpec {
    /// Its place in the pipeline.
    pub(crate) pp_rank: usize,
    /// The blocks of each of its stages.
    pub(crate) stages: Vec<Range<usize>>,
    /// Its place among the ranks that hold the same parameters.
    pub(crate) replica: usize,
    /// How many ranks hold the same parameters.
    pub(crate) num_replicas: usize,
    pub(crate) params: Vec<HeldParam>,
    /// Those that other stages use, too.
    pub(crate) ties: Vec<TieSpec>,
    /// Where gradients, the optimizer's state and slices of weights lie.
    pub(crate) layout: ParamLayout,
}

/// A parameter, or the part of it that a rank holds.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeldParam {
    /// Hugging Face name.
    pub name: String,
    /// Shape of the values of this rank.
    pub shape: Vec<usize>,
    /// Blocks of this rank that use it, rising.
    pub blocks: Vec<usize>,
    /// What is held: values, or bytes that stand for them.
    pub num_values: usize,
    /// Of the whole parameter.
    pub num_global_values: usize,
    /// Type of what is held.
    pub dtype: DType,
    /// Whether it gets a gradient and an update.
    pub trainable: bool,
    pub(crate) is_tiled: bool,
    /// Whether linear layers of this rank multiply with it as it is held.
    pub(crate) is_multiplied: bool,
    /// What a rank's gradient is, if every tensor-parallel rank has the whole parameter.
    pub(crate) replicated: Option<Gradient>,
    /// Indices of its cut dim that this rank owns: over a data-parallel replica, each is owned by exactly one rank.
    pub(crate) owned: Indices,
    /// The parts that several tensor-parallel ranks hold, this one perhaps not among them.
    pub(crate) shared: Vec<HeldRange>,
}

impl RankSpec {
    /// Its parameters, in name order.
    pub fn params(&self) -> &[HeldParam] {
        &self.params
    }

    /// How many flat buffers the parameters lie in, each reduced and gathered as one: first those of trainable parameters, in the order in
    /// which a backward pass is done with them.
    pub fn num_buckets(&self) -> usize {
        self.layout.all().count()
    }

    /// Blocks at the beginning of the model in which nothing is trained, if the rank has the first stage: no gradient needs to reach them.
    /// The head gives the loss, whatever is trained.
    pub(crate) fn num_frozen(&self, layout: &PipelineLayout) -> usize {
        let Some(first) = self.stages.iter().find(|blocks| blocks.start == 0) else {
            return 0;
        };
        let is_trained = |block: &usize| {
            let mut params = self.params.iter();
            params.any(|param| param.trainable && param.blocks.contains(block))
        };
        let num_frozen = first.clone().find(is_trained).unwrap_or(first.end);
        num_frozen.min(layout.num_blocks() - 1)
    }

    /// The names of the parameters of bucket `index` in their order, and the number of its values, of which each replica has an equal slice;
    /// `None` beyond the last bucket.
    pub fn bucket(&self, index: usize) -> Option<(Vec<&str>, usize)> {
        let bucket = self.layout.all().nth(index)?;
        let slots = bucket.slots.iter();
        let names = slots.map(|slot| self.params[slot.param].name.as_str());
        Some((names.collect(), bucket.len))
    }

    /// Indices of the cut dim of parameter `index` that this rank owns, which writes them to files: over a replica, each index has one owner.
    pub fn owned(&self, index: usize) -> &[Range<usize>] {
        self.params[index].owned.ranges()
    }

    /// Whether a rank with `other` holds the same bytes at every moment: all is alike but what they write to files.
    pub fn holds_like(&self, other: &Self) -> bool {
        let of_all = |spec: &Self| -> Vec<HeldParam> {
            let params = spec.params.iter().cloned();
            let owns_none = |param| HeldParam {
                owned: Indices::default(),
                ..param
            };
            params.map(owns_none).collect()
        };
        let place = |spec: &Self| (spec.pp_rank, spec.replica, spec.num_replicas);
        place(self) == place(other)
            && (&self.stages, &self.ties, &self.layout)
                == (&other.stages, &other.ties, &other.layout)
            && of_all(self) == of_all(other)
    }

    /// An error unless these are what was built.
    pub(super) fn check_built(&self, built: &[Param]) -> Result<()> {
        let names = |held: &[HeldParam]| -> Vec<String> {
            held.iter().map(|held| held.name.clone()).collect()
        };
        let of_built: Vec<String> = built.iter().map(|param| param.name.clone()).collect();
        if names(&self.params) != of_built {
            bail!(
                "the stages of this rank use the parameters {:?}, and its blocks asked for {of_built:?}\nhint: open a parameter store for \
                 each model",
                names(&self.params)
            );
        }
        for (held, param) in self.params.iter().zip(built) {
            if held.num_values != param.num_values() || held.dtype != param.dtype() {
                bail!(
                    "parameter {} is {} values of {:?} here; expected {} of {:?}",
                    held.name,
                    param.num_values(),
                    param.dtype(),
                    held.num_values,
                    held.dtype
                );
            }
        }
        Ok(())
    }
}

impl HeldParam {
    /// Memory of what is held.
    pub fn num_bytes(&self) -> usize {
        self.num_values * self.dtype.size_in_bytes()
    }

    /// What other tensor-parallel ranks hold of it.
    pub(super) fn sharing(&self) -> Sharing {
        match (self.shared.is_empty(), self.replicated.is_some()) {
            (true, _) => Sharing::None,
            (false, true) => Sharing::Copies,
            (false, false) => Sharing::Overlapping,
        }
    }
}
