//! Which key/value head a query head reads (grouped-query attention, Ainslie et al. 2023, arXiv:2305.13245).

use candle_core::{Result, bail};
use std::ops::Range;

/// How the local query heads map to the local key/value heads: query head `h` reads head `(offset + h) / size`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadGroups {
    /// Query heads per key/value head; 1 is multi-head attention.
    pub size: usize,
    /// Position of the first local query head in its group; not 0 when tensor parallelism cuts inside a group.
    pub offset: usize,
}

impl HeadGroups {
    /// Whole groups of `size` query heads, the first one starting at the first head.
    pub fn new(size: usize) -> Self {
        Self { size, offset: 0 }
    }

    /// Checks that `num_q_heads` local query heads find their head among `num_kv_heads`.
    ///
    /// # Errors
    /// When a group is empty, the offset is beyond the first group, or a query head reads a head that is not there.
    pub fn validate(&self, num_q_heads: usize, num_kv_heads: usize) -> Result<()> {
        let Self { size, offset } = *self;
        if size == 0 {
            bail!("HeadGroups: size must be at least 1, got 0")
        }
        if offset >= size {
            bail!("HeadGroups: offset must be less than the group size {size}, got {offset}")
        }
        if num_q_heads > 0 && self.kv_head(num_q_heads - 1) >= num_kv_heads {
            bail!(
                "HeadGroups: query head {} reads key/value head (offset({offset}) + {}) / size({size}) = {}, but there are {num_kv_heads} key/value heads",
                num_q_heads - 1,
                num_q_heads - 1,
                self.kv_head(num_q_heads - 1)
            )
        }
        Ok(())
    }

    /// The key/value head that query head `head` reads, for groups that passed [`HeadGroups::validate`].
    pub fn kv_head(&self, head: usize) -> usize {
        (self.offset + head) / self.size.max(1)
    }

    /// The query heads, of `num_q_heads`, that read `kv_head`.
    pub fn q_heads(&self, kv_head: usize, num_q_heads: usize) -> Range<usize> {
        let bound = |kv: usize| {
            (kv * self.size)
                .saturating_sub(self.offset)
                .min(num_q_heads)
        };
        bound(kv_head)..bound(kv_head + 1)
    }
}
