//! Which part of a global tensor a rank holds.

use std::ops::Range;

use candle_comm::ProcessGroup;
use candle_core::{Result, bail};

/// Part `index` of `0..len` cut into `parts` contiguous parts whose lengths differ by at most one.
pub fn part(len: usize, index: usize, parts: usize) -> Range<usize> {
    (index * len / parts)..((index + 1) * len / parts)
}

/// A contiguous part of one dim of a global tensor.
///
/// Parts may be uneven, and they may overlap: with fewer key/value heads than tensor-parallel ranks, neighbours hold the
/// same head. `owned` is the part that no lower rank holds: it is what this rank counts in a norm and writes to a file.
/// The gradients of what is held twice are summed over its holders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// The dim that is cut.
    pub dim: usize,
    /// Indices of `dim` held here.
    pub range: Range<usize>,
    /// Indices of `dim` held here and by no lower rank of the group.
    pub owned: Range<usize>,
    /// Length of `dim` in the global tensor.
    pub global: usize,
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
        let range = part(global, group.rank(), world_size);
        Ok(Self {
            dim,
            owned: range.clone(),
            range,
            global,
        })
    }

    /// The shard whose indices are groups of `unit` of this one's: heads to rows, for example.
    pub fn scaled(&self, unit: usize) -> Self {
        let scale = |range: &Range<usize>| range.start * unit..range.end * unit;
        Self {
            dim: self.dim,
            range: scale(&self.range),
            owned: scale(&self.owned),
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
