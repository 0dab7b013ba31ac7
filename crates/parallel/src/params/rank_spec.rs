//! What one rank holds of a model, by arithmetic: parts, what it owns and shares, ties, and where everything lies in buckets.

use candle_core::{DType, Result, bail};

use super::layout::{ParamLayout, Sharing};
use super::param::Param;
use super::param_spec::SharedRange;
use super::tie::TieSpec;
use crate::placement::Indices;

/// What one rank holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RankSpec {
    /// Its parameters, in name order.
    pub params: Vec<HeldParam>,
    /// Those that other stages use, too.
    pub ties: Vec<TieSpec>,
    /// Where gradients, the optimizer's state and slices of weights lie.
    pub layout: ParamLayout,
}

/// A parameter, or the part of it that a rank holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HeldParam {
    pub name: String,
    /// Blocks of this rank that use it, rising.
    pub blocks: Vec<usize>,
    /// What is held: values, or bytes that stand for them.
    pub num_values: usize,
    /// Of the whole parameter.
    pub num_global_values: usize,
    /// Type of what is held.
    pub dtype: DType,
    pub trainable: bool,
    pub is_tiled: bool,
    pub is_replicated: bool,
    /// Indices of its cut dim that this rank owns: over a data-parallel replica, each is owned by exactly one rank.
    pub owned: Indices,
    /// The parts that several tensor-parallel ranks hold, this one perhaps not among them.
    pub shared: Vec<SharedRange>,
}

impl RankSpec {
    /// An error unless these are what was built.
    pub fn check_built(&self, built: &[Param]) -> Result<()> {
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
    /// What other tensor-parallel ranks hold of it.
    pub fn sharing(&self) -> Sharing {
        match (self.shared.is_empty(), self.is_replicated) {
            (true, _) => Sharing::None,
            (false, true) => Sharing::Copies,
            (false, false) => Sharing::Overlapping,
        }
    }
}
