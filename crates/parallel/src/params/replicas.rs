//! Finds parameters whose copies on tensor-parallel or data-parallel ranks have come to differ.
//!
//! A replicated weight that ranks use on different values, declared as if they used it on the same ones, gets another gradient on
//! each rank. Its copies drift apart while the loss still falls, and a checkpoint has the copy of the first rank only.

use candle_comm::{Mesh, ReduceOp};
use candle_core::{Result, Tensor, bail};

use super::parameters::Parameters;
use crate::agreement::Comparison;
use crate::checksums::{Checksums, Shared};

impl Parameters {
    /// An error on every rank of the mesh that names the first parameter of which two tensor-parallel ranks hold different copies;
    /// `values` gives a parameter's local values, and `when` says when that was. Parts that overlap lie at other places on each rank,
    /// so where the order of sums over replicas depends on the place they may differ, and that is a warning.
    pub(crate) fn check_copies(
        &self,
        mesh: &Mesh,
        when: &str,
        values: impl Fn(usize) -> Result<Tensor>,
    ) -> Result<()> {
        if mesh.degrees.tp == 1 {
            return Ok(());
        }
        let (mut copies, mut overlapping) = (Checksums::default(), Checksums::default());
        for index in (0..self.len()).filter(|index| !self.shared_ranges(*index).is_empty()) {
            let param = self.get(index);
            let checksums = match param.shard() {
                None => &mut copies,
                Some(_) => &mut overlapping,
            };
            let values = values(index)?;
            for range in self.shared_ranges(index).iter().map(|shared| &shared.range) {
                if let Some(copy) = param.narrow(&values, range)? {
                    checksums.add(Shared::Value(param.name.clone()), range.start, &copy)?;
                }
            }
        }
        copies.compare(mesh, when)?;
        if mesh.replicas.sums_in_rank_order() {
            return overlapping.compare(mesh, when);
        }
        if let Some(difference) = overlapping.difference(mesh, when)? {
            tracing::warn!("the first rank's copy is taken, as {difference}");
        }
        Ok(())
    }

    /// An error on every rank of the mesh that names the first trained parameter of which two data-parallel ranks hold
    /// other values of what both update: all of it with ZeRO-0, the same slices with groups. What one rank updates and the others
    /// fetch is not compared. `when` says when that was. Hashes are compared. Where ranks need not come to the same bits it is a
    /// warning. Every rank must call it.
    pub(crate) fn check_replicas(&self, mesh: &Mesh, when: &str) -> Result<()> {
        let groups = self.groups();
        let group = &groups.replicate;
        if group.world_size() == 1 {
            return Ok(());
        }
        self.wait_for_updates()?;
        let mut sums = Checksums::default();
        for (index, bucket) in self.layout().buckets.iter().enumerate() {
            let own = groups.own_range(bucket.len);
            for (slot, mine) in bucket.slots_in(&own) {
                let param = self.get(slot.param);
                let values = self.own_weights(index, slot, &mine)?;
                sums.add(Shared::Replica(param.name.clone()), 0, &values)?;
            }
        }
        let place = [mesh.pp.rank(), mesh.tp.rank(), groups.shard.rank()];
        let own = Comparison::over(group, &place).summand(sums.condensed());
        let own = Tensor::new(&[own], mesh.world.device())?;
        let sum = mesh.world.all_reduce(&own, ReduceOp::Sum)?;
        if sum.to_vec1::<f64>()? == [0.0] {
            return Ok(());
        }
        match sums.difference_in(group, mesh, when)? {
            Some(difference) if mesh.replicas.sums_in_rank_order() => bail!("{difference}"),
            Some(difference) => {
                tracing::warn!("the first rank's values are taken, as {difference}")
            }
            None => {}
        }
        Ok(())
    }
}
