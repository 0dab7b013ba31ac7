//! What a rank keeps of each parameter, and what of it the rank writes.

use std::ops::Range;

use candle_core::{Result, Tensor};

use crate::optimizer::DistributedOptimizer;
use crate::params::Parameters;
use crate::placement::{intersect, offset_by};
use crate::view::View;

/// Values of a parameter that lie one after the other in the slice of a bucket that this rank updates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OwnValues {
    /// Index of the parameter.
    pub param: usize,
    /// Which of its values they are.
    pub view: View,
    /// Place of the bucket among those of trainable, then of frozen parameters.
    pub bucket: usize,
    /// Place of the first value in this rank's slice of the bucket.
    pub start: usize,
}

/// The values of all parameters that lie in this rank's slices, bucket by bucket, and of a bucket part by part. The one place that knows how
/// slots and slices lie.
pub(super) fn own_values(optimizer: &DistributedOptimizer) -> Vec<OwnValues> {
    let params = &optimizer.params;
    let mut all = Vec::new();
    for (place, bucket) in params.layout().all().enumerate() {
        let own = params.groups().own_range(bucket.len);
        let parts = match place < params.layout().buckets.len() {
            true => optimizer.parts(place),
            false => vec![0..own.len()],
        };
        for part in parts {
            let part = own.start + part.start..own.start + part.end;
            for (slot, mine) in bucket.slots_in(&part) {
                all.push(OwnValues {
                    param: slot.param,
                    view: params
                        .get(slot.param)
                        .view(offset_by(&mine, slot.range.start)),
                    bucket: place,
                    start: mine.start - own.start,
                });
            }
        }
    }
    all
}

/// Those that this rank writes: over the world each value of the model is written by one rank.
pub(super) fn written_values(optimizer: &DistributedOptimizer) -> Vec<OwnValues> {
    let params = &optimizer.params;
    if params.groups().replicate.rank() != 0 {
        return Vec::new();
    }
    let own = own_values(optimizer).into_iter();
    let written = own.flat_map(|own| {
        params.owned(own.param).iter().filter_map(move |range| {
            let local = intersect(range, &own.view.range);
            let start = own.start + local.start - own.view.range.start;
            (!local.is_empty()).then(|| OwnValues {
                start,
                view: View {
                    range: local,
                    ..own.view.clone()
                },
                ..own
            })
        })
    });
    written.collect()
}

impl OwnValues {
    pub fn len(&self) -> usize {
        self.view.len()
    }

    /// Whether they lie in this part of the slice.
    pub fn is_in(&self, part: &Range<usize>) -> bool {
        part.contains(&self.start)
    }

    /// A flat view of the weights.
    pub fn weights(&self, params: &Parameters) -> Result<Tensor> {
        match params.sharded() {
            Some(sharded) => sharded
                .slice(self.bucket)?
                .narrow(0, self.start, self.len()),
            None => params.get(self.param).flat_part(&self.view.range),
        }
    }
}
