//! Parameters that several pipeline stages use: tied weights.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use candle_comm::{Mesh, ProcessGroup, ReduceOp};
use candle_core::{Result, Tensor};

use super::catalog::GlobalPlacement;
use super::flat_buffer::FlatBuffer;
use super::param::Param;

/// Parameters that the same stages use, this rank's among them. Each stage sums the gradients that it gives; these sums are added in the
/// order of the stages, which is the same for every schedule.
pub(crate) struct Tie {
    /// The ranks that have these stages.
    group: ProcessGroup,
    /// Of each stage, in order, the rank in the group that has it.
    ranks: Vec<usize>,
    /// Those of this rank, and their blocks.
    pub own_stages: Vec<(usize, Range<usize>)>,
    /// Indices of the parameters.
    pub params: Vec<usize>,
}

impl Tie {
    /// One for each set of stages that share parameters. Every rank splits the pipeline group once per set, in the same order.
    pub(super) fn find(
        params: &[Param],
        ranks: &GlobalPlacement,
        mesh: &Mesh,
    ) -> Result<Vec<Self>> {
        let catalog = ranks.catalog()?;
        let is_trainable = |name: &str| {
            let entry = catalog.binary_search_by(|entry| entry.name.as_str().cmp(name));
            entry.is_ok_and(|index| catalog[index].trainable)
        };
        let shared = ranks.stages().iter();
        let shared = shared.filter(|(name, stages)| stages.len() > 1 && is_trainable(name));
        let shared: BTreeMap<&String, &BTreeSet<usize>> = shared.collect();
        let sets: BTreeSet<&BTreeSet<usize>> = shared.values().copied().collect();
        let (layout, own) = (ranks.layout(), mesh.pp.rank());
        let mut ties = Vec::new();
        for stages in sets {
            let members: BTreeSet<usize> = stages.iter().map(|&s| layout.rank_of(s)).collect();
            let is_member = members.contains(&own);
            let color = if is_member { 0 } else { 1 + own };
            let group = mesh.pp.split(color, own)?;
            if !is_member {
                continue;
            }
            let member_of = |stage: &usize| {
                let rank = layout.rank_of(*stage);
                members.iter().position(|member| *member == rank)
            };
            let is_own = |stage: &&usize| layout.rank_of(**stage) == own;
            let own_stages = stages.iter().filter(is_own);
            let has_tie = |index: &usize| shared.get(&params[*index].name) == Some(&stages);
            ties.push(Self {
                group,
                ranks: stages.iter().filter_map(member_of).collect(),
                own_stages: own_stages.map(|&s| (s, layout.blocks(s))).collect(),
                params: (0..params.len()).filter(has_tie).collect(),
            });
        }
        Ok(ties)
    }

    /// Adds what all stages have of equal buckets, `own` those of this rank, in the order of the stages: the sum is in the first of `own`. Every
    /// rank of the group must call it.
    pub fn sum(&self, own: &[FlatBuffer]) -> Result<()> {
        let Some(sum) = own.first() else {
            return Ok(());
        };
        if self.ranks.len() == 2 && own.len() == 1 {
            // Of two summands the order does not matter.
            let sum = self
                .group
                .start_all_reduce_in_place(sum.tensor(), ReduceOp::Sum)?;
            return sum.wait().map(drop);
        }
        // Of each rank as many rows as the one with most stages has.
        let count = |rank: usize| self.ranks.iter().filter(|of| **of == rank).count();
        let most = (0..self.group.world_size()).map(count).max().unwrap_or(1);
        let mut rows: Vec<Tensor> = own.iter().map(|own| own.tensor().clone()).collect();
        rows.resize_with(most, || sum.tensor().clone());
        let all = self.group.all_gather(&Tensor::stack(&rows, 0)?, 0)?;
        let mut next = vec![0; self.group.world_size()];
        for (place, &rank) in self.ranks.iter().enumerate() {
            let row = all.get(rank * most + next[rank])?;
            next[rank] += 1;
            match place {
                0 => sum.write(0, &row)?,
                _ => sum.add(0, &row)?,
            }
        }
        Ok(())
    }
}
