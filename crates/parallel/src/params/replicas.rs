//! Finds parameters whose copies on tensor-parallel ranks have come to differ.
//!
//! A replicated weight that ranks use on different values, declared as if they used it on the same ones, gets another gradient on
//! each rank. Its copies drift apart while the loss still falls, and a checkpoint has the copy of the first rank only.

use candle_comm::Mesh;
use candle_core::{Result, Tensor};

use super::parameters::Parameters;
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
}
