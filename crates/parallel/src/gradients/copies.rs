//! Gradients of what several tensor-parallel ranks hold: copies must have the same, summands must not.

use candle_core::{Result, Tensor, bail};

use super::accumulate::Gradients;
use crate::agreement::Comparison;
use crate::params::{Checksums, FlatBuffer, Sharing, checksum, intersect, offset_by};

impl Gradients {
    /// What this rank adds to the step's sum to compare, over tensor-parallel ranks, the gradients of the parameters of which all hold
    /// copies, the loss, and how many collectives each block made. `reduced` has the buckets as they are used for the update.
    pub(super) fn compared_copies(&self, reduced: &[FlatBuffer]) -> Result<f64> {
        let tp = &self.mesh.tp;
        if tp.world_size() == 1 {
            return Ok(0.0);
        }
        let mut has = self.totals.collectives;
        let buckets = self.params.layout().buckets.iter().zip(reduced);
        let copies = buckets.filter(|(bucket, _)| bucket.sharing == Sharing::Copies);
        let copies = copies.map(|(_, flat)| flat.tensor());
        for values in copies.chain(&self.totals.loss_sum) {
            has = has.rotate_left(1) ^ checksum(values)?;
        }
        let place = [self.mesh.pp.rank(), self.mesh.dp.rank()];
        let comparison = Comparison {
            num_ranks: tp.world_size(),
            is_first: tp.rank() == 0,
            place: &place,
        };
        Ok(comparison.summand(has))
    }

    /// The error, on every rank, for copies that were found to differ. Every rank must call it.
    pub(super) fn blame_copies(&self, reduced: &[FlatBuffer], when: &str) -> Result<()> {
        let mut checksums = Checksums::default();
        for (bucket, flat) in self.params.layout().buckets.iter().zip(reduced) {
            if bucket.sharing != Sharing::Copies {
                continue;
            }
            let own = self.params.groups().own_range(bucket.len);
            for slot in &bucket.slots {
                let mine = intersect(&slot.range, &own);
                let values = flat.view(offset_by(&mine, own.start).start, mine.len())?;
                let param = self.params.get(slot.param);
                checksums.add_values(&param.name, mine.start - slot.range.start, &values)?;
            }
        }
        checksums.compare(&self.mesh, "gradient", when)?;
        bail!(
            "tensor-parallel ranks have other losses, or made other collectives, {when}\nhint: every tensor-parallel rank runs the same \
             regions in the same order, also one that has no rows for them, and draws the same random numbers"
        )
    }
}

/// An error if `mine` is no summand of `sum`, which the `num_holders` ranks that hold a parameter added up, but the whole gradient, on
/// each of them: it would count as often. Whether something can be said of it: not of zeros.
pub(super) fn check_is_summand(
    name: &str,
    mine: &Tensor,
    sum: &Tensor,
    num_holders: usize,
) -> Result<bool> {
    let values = |values: &Tensor| values.flatten_all()?.to_vec1::<f32>();
    let (mine, sum) = (values(mine)?, values(sum)?);
    // Equal summands give a multiple of one, up to the rounding of the additions.
    let factor = num_holders as f32;
    let is_multiple = |(mine, sum): (&f32, &f32)| {
        (sum - factor * mine).abs() <= factor * f32::EPSILON * (factor * mine).abs()
    };
    let has_values = mine
        .iter()
        .zip(&sum)
        .any(|(mine, sum)| *mine != 0.0 || *sum != 0.0);
    if has_values && mine.iter().zip(&sum).all(is_multiple) {
        bail!(
            "the gradient of parameter {name} is the same on all {num_holders} tensor-parallel ranks that hold these values of it, though \
             it should be a summand on each: summed, it would be {num_holders} times too large\nhint: a weight that all ranks use on \
             the same values is asked for by get, or with Gradient::Complete; a layer whose Shard is the whole weight on every rank was \
             built with another group than mesh.tp, such as ProcessGroup::single: to hold the whole of a layer on each rank, use one that \
             is not parallel"
        );
    }
    Ok(has_values)
}
