//! What attention computes, beside its tensors.

use crate::{DocumentStarts, HeadGroups};
use candle_core::{Result, Tensor, bail};
use std::ops::Range;

/// What errors and timelines call the operation.
pub(crate) const NAME: &str = "causal_attention";

/// What the forward pass read and returned, and the gradient of its output.
#[derive(Clone, Copy, Debug)]
pub struct AttentionGrad<'a> {
    /// `(b, t, hq, d)`.
    pub q: &'a Tensor,
    /// `(b, t, hkv, d)`.
    pub k: &'a Tensor,
    /// `(b, t, hkv, d)`.
    pub v: &'a Tensor,
    /// The output, of the shape of q. GPUs read it; on the CPU what it stands for is summed anew, in f32.
    pub out: &'a Tensor,
    /// `(b, hq, t)` f32.
    pub log_sum_exp: &'a Tensor,
    /// Gradient of the output, of the shape of q.
    pub grad: &'a Tensor,
}

/// The factor of the scores, which head reads which, and how far back a query sees: in its window, and in its document.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionSpec {
    /// Factor of the scores.
    pub scale: f32,
    /// Which key/value head a query head reads.
    pub groups: HeadGroups,
    /// How many positions a query sees, itself and those just before it: query `i` reads the keys `j` with `i - window < j <= i`
    /// (Mistral 7B, Jiang et al. 2023, arXiv:2310.06825). None: all up to itself.
    pub window: Option<usize>,
    /// The documents that the sequences are made of: a query sees its own. None: each sequence is one.
    pub documents: Option<DocumentStarts>,
}

impl AttentionSpec {
    /// Attention to all positions before, without a window, each sequence one document.
    pub fn new(scale: f32, groups: HeadGroups) -> Self {
        Self {
            scale,
            groups,
            window: None,
            documents: None,
        }
    }

    /// Checks the groups for `num_q_heads` query heads on `num_kv_heads` key/value heads, the window, and the documents for `dims`, the
    /// numbers of sequences and of positions in each.
    ///
    /// # Errors
    /// As [`HeadGroups::validate`]; when the window is 0; documents of sequences of other sizes.
    pub fn validate(
        &self,
        dims: (usize, usize),
        num_q_heads: usize,
        num_kv_heads: usize,
    ) -> Result<()> {
        if let Some(documents) = &self.documents
            && documents.dims() != dims
        {
            bail!(
                "AttentionSpec: expected the documents of {dims:?} sequences and positions, got those of {:?}",
                documents.dims()
            )
        }
        if self.window == Some(0) {
            bail!(
                "AttentionSpec: a window must be at least 1, the query's own position, got 0\nhint: None is attention to all positions before"
            )
        }
        self.groups.validate(num_q_heads, num_kv_heads)
    }

    /// The positions that the query at `position` of sequence `row` sees.
    pub(crate) fn seen(&self, row: usize, position: usize) -> Range<usize> {
        let window = self.window.unwrap_or(usize::MAX);
        let seen = (position + 1).saturating_sub(window)..position + 1;
        match &self.documents {
            Some(documents) => documents.within(row, seen),
            None => seen,
        }
    }

    /// How many positions a query of `num_positions` sees at most.
    pub(crate) fn window_of(&self, num_positions: usize) -> usize {
        self.window
            .map_or(num_positions, |window| window.min(num_positions))
    }
}
