//! Parameters that several pipeline stages use: tied weights.

use std::collections::BTreeSet;
use std::ops::Range;

use candle_comm::{Mesh, ProcessGroup, ReduceOp};
use candle_core::{Result, Tensor};

use super::flat_buffer::FlatBuffer;
use crate::pipeline_layout::PipelineLayout;

/// Parameters that the same stages use, a rank's among them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TieSpec {
    /// Of each stage, in order, its rank among those that have one.
    ranks: Vec<usize>,
    /// Those of this rank, and their blocks.
    pub own_stages: Vec<(usize, Range<usize>)>,
    /// Indices of the parameters, among those of this rank.
    pub params: Vec<usize>,
}

impl TieSpec {
    /// What rank `pp_rank` of the pipeline has to do with the tie of these stages, one of which is its own.
    pub fn new(
        stages: BTreeSet<usize>,
        params: Vec<usize>,
        pp_rank: usize,
        layout: &PipelineLayout,
    ) -> Self {
        let members = members(&stages, layout);
        let member_of = |stage: &usize| {
            let rank = layout.rank_of(*stage);
            members.iter().position(|member| *member == rank)
        };
        let own_stages = stages
            .iter()
            .filter(|&&stage| layout.rank_of(stage) == pp_rank);
        Self {
            ranks: stages.iter().filter_map(member_of).collect(),
            own_stages: own_stages.map(|&s| (s, layout.blocks(s))).collect(),
            params,
        }
    }
}

/// The ranks of the pipeline that have these stages.
fn members(stages: &BTreeSet<usize>, layout: &PipelineLayout) -> BTreeSet<usize> {
    stages.iter().map(|&stage| layout.rank_of(stage)).collect()
}

/// The ranks of a [`TieSpec`]. Each stage sums the gradients that it gives; these sums are added in the order of the stages, which is the same
/// for every schedule.
pub(crate) struct Tie {
    /// The ranks that have these stages.
    group: ProcessGroup,
    /// Of each stage, in order, the rank in the group that has it.
    ranks: Vec<usize>,
}

impl Tie {
    /// The ties of this rank, whose numbers are `own`. Every rank splits the pipeline group once for each of `tied_stages`, the sets of
    /// stages that share parameters, in the same order.
    pub(super) fn connect(
        tied_stages: &BTreeSet<BTreeSet<usize>>,
        layout: &PipelineLayout,
        own: &[TieSpec],
        mesh: &Mesh,
    ) -> Result<Vec<Self>> {
        let (pp_rank, mut own) = (mesh.pp.rank(), own.iter());
        let mut ties = Vec::new();
        for stages in tied_stages {
            let is_member = members(stages, layout).contains(&pp_rank);
            let color = if is_member { 0 } else { 1 + pp_rank };
            let group = mesh.pp.split(color, pp_rank)?;
            if is_member {
                let ranks = own.next().map(|spec| spec.ranks.clone());
                let ranks = ranks.unwrap_or_default();
                ties.push(Self { group, ranks });
            }
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
