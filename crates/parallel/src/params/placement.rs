//! How a parameter lies on the ranks of a mesh.
//!
//! | axis | values | gradient of a rank |
//! |---|---|---|
//! | tp | a [`Placement`], which the layer chooses | complete, or a summand where several ranks hold the same values |
//! | pp | whole on every stage with a block that uses it | a summand: stages that share a parameter are *tied* |
//! | dp | whole on every replica (ZeRO divides what belongs to it, not the parameter) | a summand |
//! | cp | refused: nothing implements it | |
//!
//! What follows from it: of the ranks of a replica that hold a value, the first *owns* it, counts it in the norm and writes
//! it to files; where the gradients of holders are summands they are summed before anything else is done with them.

use std::ops::Range;

use candle_comm::ProcessGroup;
use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

/// Part `index` of `0..len` cut into `parts` contiguous parts whose lengths differ by at most one.
pub fn part(len: usize, index: usize, parts: usize) -> Range<usize> {
    (index * len / parts)..((index + 1) * len / parts)
}

/// How a parameter lies on the tensor-parallel ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Every rank holds all of it.
    Replicated(Gradient),
    /// Every rank holds a part. Parts may overlap: the gradients of what is held twice are summed over its holders.
    Sharded(Shard),
}

/// What a rank's gradient of a replicated parameter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Gradient {
    /// The whole gradient, the same on every rank: the ranks compute the same from the same. A norm between two
    /// tensor-parallel regions, the bias of a row-parallel layer.
    Complete,
    /// One summand of it: the ranks use the parameter on different values. A norm of queries inside a tensor-parallel
    /// region, whose ranks have different heads; a norm under sequence parallelism, whose ranks have different tokens.
    Partial,
}

/// A contiguous part of one dim of a global tensor. Parts may be uneven, and they may overlap: with fewer key/value heads than
/// tensor-parallel ranks, neighbours hold the same head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// The dim that is cut.
    pub dim: usize,
    /// Indices of `dim` held here.
    pub range: Range<usize>,
    /// Length of `dim` in the global tensor.
    pub global: usize,
}

impl From<Shard> for Placement {
    fn from(shard: Shard) -> Self {
        Self::Sharded(shard)
    }
}

impl Placement {
    /// The part held here, if it is not all.
    pub fn shard(&self) -> Option<&Shard> {
        match self {
            Self::Replicated(_) => None,
            Self::Sharded(shard) => Some(shard),
        }
    }
}

impl Shard {
    /// The part of this rank when `global` indices are divided evenly (by at most one apart) over the group.
    pub fn even(dim: usize, global: usize, group: &ProcessGroup) -> Result<Self> {
        let world_size = group.world_size();
        if global < world_size {
            bail!(
                "cannot divide {global} indices of dim {dim} over {world_size} tensor-parallel ranks: each needs at \
                 least one\nhint: use a smaller tensor-parallel degree"
            );
        }
        Ok(Self {
            dim,
            range: part(global, group.rank(), world_size),
            global,
        })
    }

    /// The shard whose indices are groups of `unit` of this one's: heads to rows, for example.
    pub fn scaled(&self, unit: usize) -> Self {
        Self {
            dim: self.dim,
            range: self.range.start * unit..self.range.end * unit,
            global: self.global * unit,
        }
    }

    /// The same part, of another dim.
    pub fn along(&self, dim: usize) -> Self {
        Self {
            dim,
            ..self.clone()
        }
    }

    /// Number of indices held here.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether nothing is held here.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }
}

/// The part of `a` that lies in `b`; empty if there is none.
pub(crate) fn intersect(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    a.start.clamp(b.start, b.end)..a.end.clamp(b.start, b.end)
}

/// `range`, counted from `start`, which is not beyond it.
pub(crate) fn offset_by(range: &Range<usize>, start: usize) -> Range<usize> {
    range.start - start..range.end - start
}

/// Ranges in rising order, those that follow each other without a gap as one; empty ones vanish.
pub(crate) fn joined(ranges: impl Iterator<Item = Range<usize>>) -> Vec<Range<usize>> {
    let mut joined: Vec<Range<usize>> = Vec::new();
    for range in ranges.filter(|range| !range.is_empty()) {
        match joined.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => joined.push(range),
        }
    }
    joined
}
