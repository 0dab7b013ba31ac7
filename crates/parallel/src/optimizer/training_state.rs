//! What a training checkpoint has of an optimizer.

use std::ops::Range;

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

use super::distributed::DistributedOptimizer;
use super::loss_scaling::LossScale;
use super::state::KindOfState;

/// Tells the kinds of state of a parameter, by its index.
pub(crate) type KindsOf<'a> = dyn Fn(usize) -> Result<Vec<KindOfState<'a>>> + 'a;

/// What the optimizer has beside its tensors, the same on every rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct OptimizerCounters {
    /// Names of the rules' kinds of state.
    pub state_names: Vec<String>,
    /// Number of updates made.
    pub num_updates: usize,
    /// If there is one that changes.
    pub loss_scale: Option<LossScale>,
}

impl DistributedOptimizer {
    pub(crate) fn counters(&self) -> OptimizerCounters {
        let names = self.rules.state_names();
        OptimizerCounters {
            state_names: names.iter().map(ToString::to_string).collect(),
            num_updates: self.num_steps,
            loss_scale: self.scaler.as_ref().map(|scaler| scaler.now),
        }
    }

    /// Goes on from where another run was. A loss scale that only one of the two has is left alone.
    pub(crate) fn set_counters(&mut self, earlier: &OptimizerCounters) {
        self.set_num_steps(earlier.num_updates);
        if let (Some(scaler), Some(earlier)) = (&mut self.scaler, earlier.loss_scale) {
            scaler.now = earlier;
        }
    }

    /// An error unless the other run's rules have the same kinds of state.
    pub(crate) fn check_rule(&self, earlier: &OptimizerCounters) -> Result<()> {
        let own = self.counters().state_names;
        if own != earlier.state_names {
            bail!(
                "the checkpoint has the optimizer state {:?}; expected {own:?}\nhint: another optimizer wrote it",
                earlier.state_names
            );
        }
        Ok(())
    }

    /// Whether state or weights are not on the device that computes.
    pub(crate) fn is_away(&self) -> bool {
        let weights = self.params.sharded();
        self.store.column.is_away() || weights.is_some_and(|weights| weights.slices.is_away())
    }

    /// The parts of what this rank updates of bucket `index` that [`Self::read_bucket`] and [`Self::change_bucket`] go through.
    pub(crate) fn parts(&self, index: usize) -> Vec<Range<usize>> {
        self.store.parts(index)
    }

    /// Lets `look` read bucket `index`, part by part: it is given the part and what tells the kinds of state of a parameter in it.
    pub(crate) fn read_bucket(
        &self,
        index: usize,
        mut look: impl FnMut(&Range<usize>, &KindsOf<'_>) -> Result<()>,
    ) -> Result<()> {
        let own = 0..self.own_range(index).len();
        let seen = self.read(index, &own, |part, state| {
            look(part, &|param| self.kinds(index, param, part, state))
        });
        self.store.forget(index)?;
        seen
    }

    /// Lets `change` write to them.
    pub(crate) fn change_bucket(
        &self,
        index: usize,
        mut change: impl FnMut(&Range<usize>, &KindsOf<'_>) -> Result<()>,
    ) -> Result<()> {
        self.change(index, |part, state| {
            change(part, &|param| self.kinds(index, param, part, state))
        })
    }
}
