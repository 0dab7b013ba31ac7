//! Gradients of what several tensor-parallel ranks hold: copies must have the same, summands must not.

use std::collections::BTreeMap;

use candle_core::{DType, Result, Tensor, bail};
use candle_ops::sum_of_squares_into;

use super::accumulate::Gradients;
use super::reduced::ReducedBuckets;
use crate::agreement::{Comparison, gather};
use crate::checksums::{Checksums, Shared, checksum};
use crate::params::FlatBuffer;
use crate::placement::{Gradient, Placement, intersect};

impl Gradients {
    /// What this rank adds to the step's sum to compare, over tensor-parallel ranks, the gradients of the parameters of which all hold
    /// copies, the loss, losses that blocks add, and how many collectives each block made. `reduced` has the buckets as
    /// they are used for the update.
    pub(super) fn compared_copies(&self, reduced: &ReducedBuckets) -> Result<f64> {
        let tp = &self.mesh.tp;
        if tp.world_size() == 1 {
            return Ok(0.0);
        }
        let mut has = self.totals.collectives;
        if let Some([distance, size]) = &self.totals.distance {
            let sums = Tensor::cat(&[distance, size], 0)?.to_vec1::<f64>()?;
            has ^= u64::from(sums[0] > MAX_DISTANCE * MAX_DISTANCE * sums[1]);
        }
        let copies = self.copies(reduced, |gradient| gradient == Gradient::Complete)?;
        let compared = copies.iter().map(|copy| copy.values.tensor().clone());
        let mut compared: Vec<Tensor> = compared.collect();
        if let Some(loss_sum) = &self.totals.loss_sum {
            compared.push(loss_sum.reshape(1)?.to_dtype(DType::F32)?);
        }
        if !tp.device().is_cpu() && compared.len() > 1 {
            // One copy to the host, not many.
            compared = vec![Tensor::cat(&compared, 0)?];
        }
        for values in &compared {
            has = has.rotate_left(1) ^ checksum(values)?;
        }
        for sum in self.added_losses().values() {
            has = has.rotate_left(1) ^ sum;
        }
        let place = [self.mesh.pp.rank(), self.mesh.replicas.rank()];
        Ok(Comparison::over(tp, &place).summand(has))
    }

    /// The gradients in `reduced` of the parameters that every tensor-parallel rank holds whole, and whose own gradients are as `wanted`.
    fn copies(
        &self,
        reduced: &ReducedBuckets,
        wanted: impl Fn(Gradient) -> bool,
    ) -> Result<Vec<CopiedGradient>> {
        let mut copies = Vec::new();
        for (index, bucket) in self.params.layout().buckets.iter().enumerate() {
            let own = self.params.groups().own_range(bucket.len);
            let mut flat = None;
            for slot in &bucket.slots {
                let mine = intersect(&slot.range, &own);
                let is_wanted = match &self.params.get(slot.param).placement {
                    Placement::Replicated(gradient) => wanted(*gradient),
                    Placement::Sharded(_) => false,
                };
                if is_wanted && !mine.is_empty() {
                    let flat = match &flat {
                        Some(flat) => flat,
                        None => flat.insert(reduced.get(index)?),
                    };
                    copies.push(CopiedGradient {
                        param: slot.param,
                        first_index: mine.start - slot.range.start,
                        values: flat.part(&(mine.start - own.start..mine.end - own.start))?,
                    });
                }
            }
        }
        Ok(copies)
    }

    /// Gives `own`, sums of copies' gradients, the first tensor-parallel rank's bits: where sums over replicas may be made in another order
    /// on each, the copies would drift apart by a unit in the last place a step.
    pub(super) fn take_first_copy(&mut self, own: &FlatBuffer) -> Result<()> {
        let tp = &self.mesh.tp;
        let first = tp.broadcast(own.tensor(), 0)?;
        if self.totals.distance.is_none() {
            let zero = || Tensor::zeros(1, DType::F64, tp.device());
            self.totals.distance = Some([zero()?, zero()?]);
        }
        if let Some([distance, size]) = &self.totals.distance {
            sum_of_squares_into(distance, true, &(own.tensor() - &first)?)?;
            sum_of_squares_into(size, true, &first)?;
        }
        own.write(0, &first)
    }

    /// Hashes of the losses that blocks have added, by name.
    fn added_losses(&self) -> BTreeMap<&str, u64> {
        let all = self.totals.reported.iter();
        all.filter(|(_, reported)| reported.is_loss())
            .map(|(name, reported)| (name.as_str(), reported.condensed(name)))
            .collect()
    }

    /// An error on every rank that names the first added loss which two tensor-parallel ranks do not have alike. Every
    /// rank must call it.
    pub(super) fn blame_losses(&self, when: &str) -> Result<()> {
        let own = (self.mesh.world.rank(), self.added_losses());
        let all: Vec<(usize, BTreeMap<String, u64>)> = gather(&self.mesh.tp, &own)?;
        let mut difference = None;
        if let Some(((first, expected), others)) = all.split_first() {
            for (rank, losses) in others {
                let mut names = expected.keys().chain(losses.keys());
                let name = names.find(|name| expected.get(*name) != losses.get(*name));
                let Some(name) = name else { continue };
                let is = match (expected.get(name), losses.get(name)) {
                    (Some(_), Some(_)) => format!("differs between ranks {first} and {rank}"),
                    (Some(_), None) => format!("is added on rank {first} and not on rank {rank}"),
                    _ => format!("is added on rank {rank} and not on rank {first}"),
                };
                difference.get_or_insert(format!("the loss {name} {is}"));
            }
        }
        let of_ranks: Vec<Option<String>> = gather(&self.mesh.world, &difference)?;
        match of_ranks.into_iter().flatten().next() {
            None => Ok(()),
            Some(difference) => bail!(
                "{difference} {when}: tensor-parallel ranks must add the same by Pass::add_loss\nhint: what is computed inside a tensor-parallel \
                 region is one rank's part: sum it first (regions::reduce_from_tensor_parallel_region); what is added on one rank alone \
                 trains that rank's weights alone"
            ),
        }
    }

    /// The error, on every rank, for copies that were found to differ. Every rank must call it.
    pub(super) fn blame_copies(&self, reduced: &ReducedBuckets, when: &str) -> Result<()> {
        let mut checksums = Checksums::default();
        for copy in self.copies(reduced, |_| true)? {
            let name = self.params.get(copy.param).name.clone();
            checksums.add(
                Shared::Gradient(name),
                copy.first_index,
                copy.values.tensor(),
            )?;
        }
        checksums.compare(&self.mesh, when)?;
        bail!(
            "tensor-parallel ranks have other losses, other gradients of what they have copies of, or made other collectives, \
             {when}\nhint: every tensor-parallel rank runs the same regions in the same order, also one that has no rows for them, and \
             draws the same random numbers"
        )
    }
}

/// Values of a parameter that every tensor-parallel rank holds whole.
struct CopiedGradient {
    param: usize,
    /// Index of the first of them in the parameter.
    first_index: usize,
    values: FlatBuffer,
}

/// How far, relative to their norm, sums of the same summands in another order are apart at most.
const MAX_DISTANCE: f64 = 1e-4;

#[cfg(test)]
mod tests {
    use candle_comm::{Degrees, Mesh, launch};
    use candle_core::Device;
    use candle_nn::Init;

    use super::*;
    use crate::agreement::Facts;
    use crate::{ParamStore, PipelineLayout};

    /// What two tensor-parallel ranks, whose sums of a norm's gradient are these, take for it, and whether they say that it is the same.
    fn taken(sums: [f32; 2]) -> Result<(Vec<f32>, bool)> {
        let degrees = Degrees {
            pp: 1,
            dp: 1,
            cp: 1,
            tp: 2,
        };
        let ranks = launch::threads(2, |world| {
            let mesh = Mesh::new(world, degrees)?;
            let store = ParamStore::init(0);
            let vb = store.builder(DType::F32, &Device::Cpu);
            vb.get(3, "norm", Init::Const(1.0))?;
            let params = store.seal(&mesh, Facts::default(), &PipelineLayout::even(1, 1)?)?;
            let mut gradients = Gradients::new(&params, &mesh)?;
            let own = FlatBuffer::zeros(params.layout().buckets[0].len, &Device::Cpu)?;
            own.write(
                0,
                &Tensor::new(&[1.0, sums[mesh.tp.rank()], -2.0], &Device::Cpu)?,
            )?;
            gradients.take_first_copy(&own)?;
            let values = own.values(0, 3)?;
            Ok((
                values,
                gradients.compared_copies(&ReducedBuckets::Here(vec![own]))?,
            ))
        })?;
        assert_eq!(ranks[0].0, ranks[1].0, "the ranks have different copies");
        let sum = ranks[0].1 + ranks[1].1;
        Ok((ranks[0].0.clone(), sum == 0.0))
    }

    #[test]
    fn copies_are_the_first_rank_s_and_may_have_differed_by_rounding_only() -> Result<()> {
        let next = f32::from_bits(0.1f32.to_bits() + 1);
        assert_eq!(taken([0.1, 0.1])?, (vec![1.0, 0.1, -2.0], true));
        assert_eq!(taken([0.1, next])?, (vec![1.0, 0.1, -2.0], true));
        assert_eq!(taken([next, 0.1])?, (vec![1.0, next, -2.0], true));
        assert_eq!(taken([0.1, 0.11])?, (vec![1.0, 0.1, -2.0], false));
        Ok(())
    }
}
