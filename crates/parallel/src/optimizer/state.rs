//! An optimizer's state by name and place in the whole parameter, so that it can move to another layout.

use std::ops::Range;

use candle_core::{Result, Tensor, bail};

use super::distributed::DistributedOptimizer;
use super::master_weights::MASTER;
use super::state_store::BucketState;
use crate::params::{Param, Slot, intersect, offset_by};

/// What a rank keeps of one kind of state for one parameter.
#[derive(Clone, Debug, PartialEq)]
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

/// Where the values of a bucket's slot lie: `local` in the bucket's part that is kept here, `global` in the parameter.
struct Run {
    local: Range<usize>,
    global: Range<usize>,
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
                    self.push_state(&mut all, (index, slot), state)?;
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
        (index, slot): (usize, &Slot),
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
        for (kind, buffer) in self.buffers(state) {
            let values = buffer.narrow(0, local.start, local.len())?;
            all.push(OptimizerState {
                name: param.name.clone(),
                kind: kind.to_string(),
                offsets: offsets.clone(),
                values: values.to_vec1::<f32>()?,
            });
        }
        Ok(())
    }

    /// Takes from `state`, of this or another rank and layout, what lies in the values that this rank updates, and returns how
    /// many values that were. Weights stay as they are, but bf16 ones of which this rank
    /// keeps remainders: those become the masters, rounded. Other ranks do not hear of it until the next update: load the weights too.
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
            let take = |bucket: &BucketState| match self
                .buffers(bucket)
                .find(|(known, _)| known == kind)
            {
                Some((_, buffer)) => take_values(buffer, &runs, state),
                None => Ok(0),
            };
            num_taken += match kind.as_str() {
                MASTER => self.change(index, take)?,
                _ => self.store.change(index, take)?,
            };
        }
        Ok(num_taken)
    }

    /// Kinds of state of a bucket, and their values.
    pub(super) fn buffers<'a>(
        &'a self,
        bucket: &'a BucketState,
    ) -> impl Iterator<Item = (&'a str, &'a Tensor)> {
        let names = self.rule.state_names().iter().copied();
        let masters = bucket.master.iter().map(|values| (MASTER, values));
        names.zip(&bucket.state).chain(masters)
    }

    /// What this rank keeps of the values at `range` of bucket `index`, which are those of `param`.
    fn runs(&self, index: usize, range: &Range<usize>, param: &Param) -> Vec<Run> {
        let own = self.own_range(index);
        let mine = intersect(range, &own);
        if mine.is_empty() {
            return Vec::new();
        }
        let mine = offset_by(&mine, range.start);
        let runs = param.global_runs().filter_map(|(global, local)| {
            let both = intersect(&local, &mine);
            if both.is_empty() {
                return None;
            }
            let within = offset_by(&both, local.start);
            Some(Run {
                local: range.start + both.start - own.start..range.start + both.end - own.start,
                global: global.start + within.start..global.start + within.end,
            })
        });
        runs.collect()
    }
}

/// Writes to `buffer`, of which `runs` tell the places, what of them is in `state`; returns the number of values.
fn take_values(buffer: &Tensor, runs: &[Run], state: &OptimizerState) -> Result<usize> {
    let mut num_taken = 0;
    for run in runs {
        let mut start = 0;
        for range in &state.offsets {
            let both = intersect(range, &run.global);
            if !both.is_empty() {
                let from = offset_by(&both, range.start);
                let from = &state.values[start + from.start..start + from.end];
                let to = run.local.start + both.start - run.global.start;
                let from = Tensor::new(from, buffer.device())?;
                buffer.slice_set(&from, 0, to)?;
                num_taken += both.len();
            }
            start += range.len();
        }
    }
    Ok(num_taken)
}
