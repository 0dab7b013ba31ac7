//! An optimizer's state by name and place in the whole parameter, so that it can move to another layout.

use std::collections::BTreeMap;
use std::ops::Range;

use candle_core::{Result, Tensor, bail};

use super::distributed::DistributedOptimizer;
use super::master_weights::part_of_own;
use super::state_store::{BucketState, MASTER};
use crate::params::{Param, Slot};
use crate::placement::{intersect, joined, offset_by};
use crate::view::{ValueRun, common};

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

/// One kind of state of a parameter, or its masters, in a part of a bucket.
pub(crate) struct KindOfState<'a> {
    pub name: &'static str,
    values: &'a Tensor,
    /// Place of the first one in the rank's slice of the bucket.
    start: usize,
}

impl KindOfState<'_> {
    /// The `len` values of the parameter that lie from `start` of the rank's slice of the bucket on, all in the part: flat, to be read or
    /// written.
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
        let mut all = BTreeMap::new();
        for (index, bucket) in self.params.layout().buckets.iter().enumerate() {
            let own = 0..self.own_range(index).len();
            self.read(index, &own, |part, state| {
                let mut slots = bucket.slots.iter();
                slots.try_for_each(|slot| self.add_state(&mut all, index, slot, part, state))
            })?;
        }
        Ok(all.into_values().collect())
    }

    /// Adds what a part of bucket `index`, whose state is `state`, keeps of the parameter at `slot`.
    fn add_state<'a>(
        &'a self,
        all: &mut BTreeMap<(&'a str, &'static str), OptimizerState>,
        index: usize,
        slot: &Slot,
        part: &Range<usize>,
        state: &BucketState,
    ) -> Result<()> {
        let param = self.params.get(slot.param);
        let runs = self.runs(index, part, &slot.range, param);
        // The runs of a parameter lie one after the other here.
        let (Some(first), Some(last)) = (runs.first(), runs.last()) else {
            return Ok(());
        };
        let local = first.local.start..last.local.end;
        for kind in self.kinds(index, slot.param, part, state)? {
            let values = kind.part(local.start, local.len())?.to_vec1::<f32>()?;
            let of_kind = all.entry((&param.name, kind.name));
            let of_kind = of_kind.or_insert_with(|| OptimizerState {
                name: param.name.clone(),
                kind: kind.name.to_string(),
                offsets: Vec::new(),
                values: Vec::new(),
            });
            of_kind.values.extend(values);
            let offsets = runs.iter().map(|run| run.global.clone());
            of_kind.offsets = joined(of_kind.offsets.drain(..).chain(offsets));
        }
        Ok(())
    }

    /// Takes from `state`, of this or another rank and layout, what lies in the values that this rank updates, and returns how
    /// many values that were. Only this rank's state changes. Weights stay as they are, except bf16 ones whose low bits this rank stores: those
    /// become the masters, rounded. Load the weights on all ranks as well.
    ///
    /// # Errors
    /// State whose offsets and values do not match or whose offsets do not rise, and state that ends beyond the parameter.
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
        if let Some(pair) = offsets.windows(2).find(|two| two[0].end > two[1].start) {
            bail!(
                "the state {kind} of {name} has the offsets {:?} before {:?}; expected rising ones that do not overlap",
                pair[0],
                pair[1]
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
            let own = 0..self.own_range(index).len();
            if self.runs(index, &own, &slot.range, param).is_empty() {
                continue;
            }
            let take = |part: &Range<usize>, of_part: &BucketState| {
                let kinds = self.kinds(index, slot.param, part, of_part)?;
                if let Some(known) = kinds.iter().find(|known| known.name == kind) {
                    let runs = self.runs(index, part, &slot.range, param);
                    num_taken += take_values(known, &runs, state)?;
                }
                Ok(())
            };
            match kind.as_str() {
                MASTER => self.change(index, take)?,
                _ => self.store.change(index, take)?,
            };
        }
        Ok(num_taken)
    }

    /// Names of the kinds of state of parameter `param`, which is in bucket `index`: those of its rule, and that of masters.
    pub(crate) fn kind_names(&self, index: usize, param: usize) -> Vec<&'static str> {
        let names = self.rules.of(param).state_names().iter().copied();
        let master = self.store.shape(index).master.map(|_| MASTER);
        names.chain(master).collect()
    }

    /// Kinds of state of parameter `param`, which is in bucket `index`, of whose part `part` the state is `state`.
    pub(super) fn kinds<'a>(
        &self,
        index: usize,
        param: usize,
        part: &Range<usize>,
        state: &'a BucketState,
    ) -> Result<Vec<KindOfState<'a>>> {
        let span = self.rules.span(index, param)?;
        let of_rule = state.state[span.kinds.clone()].iter();
        // Where several rules have their own, the part is the whole.
        let of_rule = of_rule.map(|values| (values, span.range.start.max(part.start)));
        let masters = state.master.iter().map(|values| (values, part.start));
        let names = self.kind_names(index, param).into_iter();
        let kinds = names.zip(of_rule.chain(masters));
        let kinds = kinds.map(|(name, (values, start))| KindOfState {
            name,
            values,
            start,
        });
        Ok(kinds.collect())
    }

    /// What a part of what this rank keeps has of the values at `range` of bucket `index`, which are those of `param`: `local` counts in all
    /// that is kept.
    fn runs(
        &self,
        index: usize,
        part: &Range<usize>,
        range: &Range<usize>,
        param: &Param,
    ) -> Vec<ValueRun> {
        let own = self.own_range(index);
        let mine = intersect(range, &part_of_own(&self.params, index, part));
        if mine.is_empty() {
            return Vec::new();
        }
        let first = mine.start - own.start;
        let runs = param.view(offset_by(&mine, range.start)).runs();
        let in_own = runs.map(|run| ValueRun {
            local: first + run.local.start..first + run.local.end,
            ..run
        });
        in_own.collect()
    }
}

/// Writes to `kind`, of which `runs` tell the places, what of them is in `state`; returns the number of values.
fn take_values(kind: &KindOfState<'_>, runs: &[ValueRun], state: &OptimizerState) -> Result<usize> {
    let mut next = 0;
    let stored = state.offsets.iter().map(|offsets| {
        let start = next;
        next += offsets.len();
        ValueRun {
            global: offsets.clone(),
            local: start..next,
        }
    });
    let mut num_taken = 0;
    for both in common(runs.iter().cloned(), stored) {
        let from = &state.values[both.other_start..both.other_start + both.len];
        let from = Tensor::new(from, kind.values.device())?;
        kind.part(both.start, both.len)?.slice_set(&from, 0, 0)?;
        num_taken += both.len;
    }
    Ok(num_taken)
}
