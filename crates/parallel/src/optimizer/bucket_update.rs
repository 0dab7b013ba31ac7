//! The update of a bucket: its parameters group by group, each by the rule of its group.

use std::ops::Range;

use candle_core::{Error, Result, Tensor};

use super::distributed::DistributedOptimizer;
use super::master_weights::part_of_own;
use super::optimizer::{Needs, ParamSlice, SliceWeight, UpdateStep};
use super::param_matrix::ParamMatrix;
use super::state_store::BucketState;
use crate::gradients::ReducedGradients;
use crate::params::Slot;
use crate::placement::{intersect, offset_by};

impl DistributedOptimizer {
    /// Updates the weights that an item of the state is for, group by group, in update `number`.
    pub(crate) fn update_part(
        &self,
        item: usize,
        reduced: &ReducedGradients,
        number: usize,
        lr: f64,
    ) -> Result<()> {
        let (index, part) = self.store.part(item);
        let bucket = &self.params.layout().buckets[index];
        let update = || {
            if let Some(sharded) = self.params.sharded() {
                // It stays until it is put back.
                sharded.slices.get(index)?;
            }
            let (grad, state) = (reduced.bucket(index)?, self.store.get(item)?);
            for slots in self.rules.by_group(bucket) {
                let group = slots.first().and_then(|slot| self.rules.group(slot.param));
                let step = UpdateStep {
                    number,
                    lr: lr * group.map_or(1.0, |group| group.lr_scale),
                    weight_decay: group.and_then(|group| group.weight_decay),
                    grad_scale: reduced.scale(),
                };
                self.update_group(index, part, &slots, grad.tensor(), &state, &step)?;
            }
            Ok(())
        };
        update().map_err(|err: Error| {
            let first = bucket.slots.first();
            let name = first.map_or("nothing", |slot| &self.params.get(slot.param).name);
            err.context(format!("updating the parameters from {name} on"))
        })
    }

    /// Updates what a part of this rank's values of bucket `index` has of the parameters at `slots`, which are of one group: first those of which
    /// the rule needs no more than that, then matrix by matrix. `state` is that of the part.
    fn update_group(
        &self,
        index: usize,
        part: &Range<usize>,
        slots: &[&Slot],
        grad: &Tensor,
        state: &BucketState,
        step: &UpdateStep,
    ) -> Result<()> {
        let Some(first) = slots.first() else {
            return Ok(());
        };
        let (rule, span) = (
            self.rules.of(first.param),
            self.rules.span(index, first.param)?,
        );
        let range = intersect(&span.range, part);
        let grad = grad.narrow(0, range.start, range.len())?;
        let masters = state.master.as_ref();
        let masters =
            masters.map(|masters| masters.narrow(0, range.start - part.start, range.len()));
        let master = masters.transpose()?;
        let slice = |weights| ParamSlice {
            grad: &grad,
            master: master.as_ref(),
            state: &state.state[span.kinds.clone()],
            weights,
        };
        let own = part_of_own(&self.params, index, &range);
        let start = own.start;
        let needs = |slot: &Slot| rule.needs(self.params.get(slot.param));
        let (whole, sliced): (Vec<&Slot>, Vec<&Slot>) =
            (slots.iter()).partition(|slot| needs(slot) == Needs::Matrix);
        let mut weights = Vec::new();
        for slot in sliced {
            let mine = intersect(&slot.range, &own);
            if !mine.is_empty() {
                weights.push(SliceWeight {
                    param: self.params.get(slot.param),
                    range: offset_by(&mine, slot.range.start),
                    values: self.params.own_weights(index, slot, &mine)?,
                    start: mine.start - start,
                });
            }
        }
        // Weights of a slice share a storage: an operation may write to one view of it at a time.
        let at_once = match self.params.sharded() {
            Some(_) => 1,
            None => usize::MAX,
        };
        for weights in weights.chunks(at_once) {
            rule.update(&slice(weights), step)?;
        }
        for slot in whole {
            let matrix =
                ParamMatrix::new(&self.params, &self.mesh.tp, index, slot, &slice(&[]), start)?;
            rule.update_matrix(&matrix, step)?;
        }
        Ok(())
    }
}
