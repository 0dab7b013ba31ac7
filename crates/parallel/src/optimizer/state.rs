//! An optimizer's state by name and place in the whole parameter, so that it can move to another layout.

use std::ops::Range;

use candle_core::{Result, Tensor, bail};

use super::distributed::DistributedOptimizer;
use super::master_weights::MASTER;
use super::state_store::BucketState;
use crate::params::{Param, Slot};
use crate::placement::{Run, intersect, offset_by};

/// What a rank keeps of one kind of state for one parameter.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct OptimizerState {
    /// Hugging Face name of the parameter.
    pub name: String,
    /// One of [`Optimizer::state_names`](crate::Optimizer::state_names), or `master`: the weights before they were rounded to
    /// their type, of those that are not f32.
    pub kind: String,
    /// Row-major offsets into the whole parameter, rising.
    pub offsets: Vec<Range<usize>>,
    /// The values at these offsets, one after the other.
    pub values: Vec<f32>,
}

/// One kind of state of a parameter, or its masters.
pub(crate) struct KindOfState<'a> {
    pub name: &'a str,
    values: &'a Tensor,
    /// Place of the first one in the rank's slice of the bucket.
    start: usize,
}

impl KindOfState<'_> {
    /// The `len` values of the parameter that lie from `start` of the rank's slice of the bucket on: flat, to be read or written.
    pub fn part(&self, start: usize, len: usize) -> Result<Tensor> {
        self.values.narrow(0, start - self.start, len)
    }
}

impl DistributedOptimizer {
    /// The state that this rank keeps, in name order. Over the mesh each value of a parameter has its state on at least one
    /// rank; values that several ranks hold have the same on each.
    ///
    /// # Errors
    /// What reading from the device returns.
    pub fn state(&self) -> Result<Vec<OptimizerState>> {
        let mut all = Vec::new();
        for (index, bucket) in self.params.layout().buckets.iter().enumerate() {
            self.read(index, |state| {
                for slot in &bucket.slots {
                    self.push_state(&mut all, index, slot, state)?;
                }
                Ok(())
            })?;
        }
        all.sort_by(|a, b| (&a.name, &a.kind).cmp(&(&b.name, &b.kind)));
        Ok(all)
    }

    /// Adds what bucket `index`, whose state is `state`, keeps of the parameter at `slot`.
    fn push_state(
        &self,
        all: &mut Vec<OptimizerState>,
        index: usize,
        slot: &Slot,
        state: &BucketState,
    ) -> Result<()> {
        let param = self.params.get(slot.param);
        let runs = self.runs(index, &slot.range, param);
        let offsets: Vec<_> = runs.iter().map(|run| run.global.clone()).collect();
        // The runs of a parameter lie one after the other here.
        let (Some(first), Some(last)) = (runs.first(), runs.last()) else {
            return Ok(());
        };
        let local = first.local.start..last.local.end;
        for kind in self.kinds(index, slot.param, state)? {
            let values = kind.part(local.start, local.len())?;
            all.push(OptimizerState {
                name: param.name.clone(),
                kind: kind.name.to_string(),
                offsets: offsets.clone(),
                values: values.to_vec1::<f32>()?,
            });
        }
        Ok(())
    }

    /// Takes from `state`, of this or another rank and layout, what lies in the values that this rank updates, and returns how
    /// many values that were. Only this rank's state changes. Weights stay as they are, except bf16 ones whose low bits this rank stores: those
    /// become the masters, rounded. Load the weights on all ranks as well.
    ///
    /// # Errors
    /// State whose offsets and values do not match, and state that ends beyond the parameter.
    pub fn load_state(&mut self, state: &OptimizerState) -> Result<usize> {
        let OptimizerState {
            name,
            kind,
            offsets,
            values,
        } = state;
        let num_values: usize = offsets.iter().map(Range::len).sum();
        if num_values != values.len() {
            bail!(
                "the state {kind} of {name} has {} values for {num_values} offsets",
                values.len()
            );
        }
        let mut num_taken = 0;
        for (index, bucket) in self.params.layout().buckets.iter().enumerate() {
            let is_named = |index: usize| self.params.get(index).name == *name;
            let Some(slot) = bucket.slots.iter().find(|slot| is_named(slot.param)) else {
                continue;
            };
            let param = self.params.get(slot.param);
            let end = param.global_shape.elem_count();
            if let Some(beyond) = offsets.iter().find(|range| range.end > end) {
                bail!(
                    "the state {kind} of {name} has the offsets {beyond:?}, but the parameter of shape {:?} ends at {end}\n\
                     hint: it belongs to another model",
                    param.global_shape
                );
            }
            let runs = self.runs(index, &slot.range, param);
            if runs.is_empty() {
                continue;
            }
            let take = |bucket: &BucketState| {
                let kinds = self.kinds(index, slot.param, bucket)?;
                match kinds.iter().find(|known| known.name == kind) {
                    Some(kind) => take_values(kind, &runs, state),
                    None => Ok(0),
                }
            };
            num_taken += match kind.as_str() {
                MASTER => self.change(index, take)?,
                _ => self.store.change(index, take)?,
            };
        }
        Ok(num_taken)
    }

    /// Kinds of state of parameter `param`, which is in bucket `index`.
    pub(super) fn kinds<'a>(
        &self,
        index: usize,
        param: usize,
        bucket: &'a BucketState,
    ) -> Result<Vec<KindOfState<'a>>> {
        let span = self.rules.span(index, param)?;
        let names = self.rules.of(param).state_names().iter();
        let kinds = names.zip(&bucket.state[span.kinds.clone()]);
        let kinds = kinds.map(|(&name, values)| (name, values, span.range.start));
        let masters = bucket.master.iter().map(|values| (MASTER, values, 0));
        let all = kinds.chain(masters);
        let all = all.map(|(name, values, start)| KindOfState {
            name,
            values,
            start,
        });
        Ok(all.collect())
    }

    /// What this rank keeps of the values at `range` of bucket `index`, which are those of `param`: `local` counts in what is kept.
    fn runs(&self, index: usize, range: &Range<usize>, param: &Param) -> Vec<Run> {
        let own = self.own_range(index);
        let mine = intersect(range, &own);
        if mine.is_empty() {
            return Vec::new();
        }
        let mine = offset_by(&mine, range.start);
        let place = |offset: usize| range.start + offset - own.start;
        let runs = param.runs(mine).map(|run| Run {
            local: place(run.local.start)..place(run.local.end),
            ..run
        });
        runs.collect()
    }
}

/// Writes to `kind`, of which `runs` tell the places, what of them is in `state`; returns the number of values.
fn take_values(kind: &KindOfState<'_>, runs: &[Run], state: &OptimizerState) -> Result<usize> {
    let mut num_taken = 0;
    for run in runs {
        let mut start = 0;
        for range in &state.offsets {
            let both = intersect(range, &run.global);
            if !both.is_empty() {
                let from = offset_by(&both, range.start);
                let from = &state.values[start + from.start..start + from.end];
                let to = run.local.start + both.start - run.global.start;
                let from = Tensor::new(from, kind.values.device())?;
                kind.part(to, both.len())?.slice_set(&from, 0, 0)?;
                num_taken += both.len();
            }
            start += range.len();
        }
    }
    Ok(num_taken)
}
