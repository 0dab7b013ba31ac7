//! What attention computes, beside its tensors.

use crate::HeadGroups;
use candle_core::{Result, bail};

/// The factor of the scores, which head reads which, and how far back a query sees.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionSpec {
    /// Factor of the scores.
    pub scale: f32,
    /// Which key/value head a query head reads.
    pub groups: HeadGroups,
    /// How many positions a query sees, itself and those just before it: query `i` reads the keys `j` with `i - window < j <= i`
    /// (Mistral 7B, Jiang et al. 2023, arXiv:2310.06825). None: all up to itself.
    pub window: Option<usize>,
}

impl AttentionSpec {
    /// Attention to all positions before, without a window.
    pub fn new(scale: f32, groups: HeadGroups) -> Self {
        Self {
            scale,
            groups,
            window: None,
        }
    }

    /// Checks the groups for `num_q_heads` query heads on `num_kv_heads` key/value heads, and the window.
    ///
    /// # Errors
    /// As [`HeadGroups::validate`]; when the window is 0.
    pub fn validate(&self, num_q_heads: usize, num_kv_heads: usize) -> Result<()> {
        if self.window == Some(0) {
            bail!(
                "AttentionSpec: a window must be at least 1, the query's own position, got 0\nhint: None is attention to all positions before"
            )
        }
        self.groups.validate(num_q_heads, num_kv_heads)
    }

    /// How many positions a query of `num_positions` sees at most.
    pub(crate) fn window_of(&self, num_positions: usize) -> usize {
        self.window
            .map_or(num_positions, |window| window.min(num_positions))
    }
}
