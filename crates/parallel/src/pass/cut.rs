//! What context-parallel ranks have of a micro-batch.

use std::sync::OnceLock;

use candle_comm::ProcessGroup;
use candle_core::{Device, Result, Tensor, bail};
use candle_ops::{AttentionRows, Runs};

use super::context_rows::ContextRows;
use super::pass::Pass;
use super::pass_report::ContextRank;

/// A micro-batch whose rows are divided over context-parallel ranks: every document as [`Runs::cut`] cuts it.
#[derive(Debug)]
pub(crate) struct Cut {
    /// The whole micro-batch.
    pub whole: Pass,
    /// The rows of each rank.
    parts: Vec<Runs>,
    rank: usize,
    /// Those of this rank, by their places in the whole.
    pub rows: Vec<u32>,
    /// Made when attention first asks for them; all layers share their groups.
    context: OnceLock<ContextRows>,
}

impl Cut {
    /// The part of this rank of `cp`.
    pub fn new(whole: &Pass, cp: &ProcessGroup) -> Result<Self> {
        let runs = whole.rows(0)?.queries().clone();
        let cuts = (0..cp.world_size()).map(|rank| runs.cut(cp.world_size(), rank));
        let (parts, mut rows): (Vec<_>, Vec<_>) = cuts.unzip();
        Ok(Self {
            whole: whole.clone(),
            parts,
            rank: cp.rank(),
            rows: rows.swap_remove(cp.rank()),
            context: OnceLock::new(),
        })
    }

    /// The rows of all ranks for attention.
    pub fn context_rows(
        &self,
        ulysses: &ProcessGroup,
        ring: &ProcessGroup,
        device: &Device,
    ) -> Result<&ContextRows> {
        if ulysses.world_size() * ring.world_size() != self.parts.len() {
            bail!(
                "attention is divided over {} context-parallel ranks and the sequences over {}\nhint: ContextParallel::new(&mesh, ..) is for the ranks of a mesh",
                ulysses.world_size() * ring.world_size(),
                self.parts.len()
            );
        }
        if let Some(known) = self.context.get() {
            if known.members.len() != ulysses.world_size() {
                bail!(
                    "layers attend by groups of other sizes\nhint: one ContextParallel for all of them"
                );
            }
            return Ok(known);
        }
        let rows = ContextRows::new(&self.parts, ulysses, ring, device)?;
        Ok(self.context.get_or_init(|| rows))
    }

    /// What each rank computes.
    pub fn work(&self) -> Result<Vec<ContextRank>> {
        let whole = self.whole.rows(0)?.queries().clone();
        let of_rank = |own: &Runs| ContextRank {
            num_rows: own.num_rows(),
            num_pairs: AttentionRows::new(own.clone(), whole.clone()).num_pairs(None),
        };
        Ok(self.parts.iter().map(of_rank).collect())
    }

    /// This rank's rows.
    pub fn own(&self) -> &Runs {
        &self.parts[self.rank]
    }

    /// This rank's rows of `xs`, (b, t, ..), as one sequence: (1, rows, ..).
    pub fn take(&self, xs: &Tensor) -> Result<Tensor> {
        let (b, t) = self.whole.dims()?;
        if xs.rank() < 2 || xs.dims()[..2] != [b, t] {
            bail!(
                "context-parallel ranks divide the positions of sequences; expected inputs and targets of ({b}, {t}, ..), got {:?}\nhint: cp = 1",
                xs.shape()
            )
        }
        let rows = Tensor::new(&self.rows[..], xs.device())?;
        let xs = xs.flatten(0, 1)?.contiguous()?.index_select(&rows, 0)?;
        xs.unsqueeze(0)
    }
}
