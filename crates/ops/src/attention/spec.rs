//! What attention computes, beside its tensors.

use super::head_groups::HeadGroups;
#[cfg(feature = "cudnn")]
use super::rectangle::Rectangle;
use super::runs::AttentionRows;
use candle_core::{Result, Tensor, bail};

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
    /// The output, of the shape of q. GPUs need it; on the CPU what it stands for is summed anew, in f32.
    pub out: Option<&'a Tensor>,
    /// `(b, hq, t)` f32.
    pub log_sum_exp: &'a Tensor,
    /// Gradient of the output, of the shape of q.
    pub grad: &'a Tensor,
}

impl<'a> AttentionGrad<'a> {
    /// The output, which GPUs read.
    #[cfg(feature = "cuda")]
    pub(crate) fn output(&self) -> Result<&'a Tensor> {
        match self.out {
            Some(out) => Ok(out),
            None => bail!("{NAME}: the backward pass on a GPU needs the output"),
        }
    }
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
    /// Which tokens the rows of q, k and v are: a query sees those of its own document. None: each sequence is one, from its first token on.
    pub rows: Option<AttentionRows>,
}

impl AttentionSpec {
    /// Attention to all positions before, without a window, each sequence one document.
    pub fn new(scale: f32, groups: HeadGroups) -> Self {
        Self {
            scale,
            groups,
            window: None,
            rows: None,
        }
    }

    /// The same for these rows: packed documents, what is cut of sequences, queries that come after keys.
    pub fn with_rows(self, rows: impl Into<AttentionRows>) -> Self {
        Self {
            rows: Some(rows.into()),
            ..self
        }
    }

    /// Checks the groups for `num_q_heads` query heads on `num_kv_heads` key/value heads, the window, and the rows for `queries` and `keys`, the
    /// numbers of sequences and of positions in each.
    ///
    /// # Errors
    /// As [`HeadGroups::validate`]; when the window is 0; rows of tensors of other sizes.
    pub fn validate(
        &self,
        queries: (usize, usize),
        keys: (usize, usize),
        num_q_heads: usize,
        num_kv_heads: usize,
    ) -> Result<()> {
        match &self.rows {
            Some(rows) if (rows.queries().dims(), rows.keys().dims()) != (queries, keys) => bail!(
                "AttentionSpec: expected the documents of {queries:?} sequences and positions of q and {keys:?} of k and v, got those of {:?} and {:?}",
                rows.queries().dims(),
                rows.keys().dims()
            ),
            Some(rows) if !rows.are_of_one() => {
                bail!("AttentionSpec: the rows of q and those of k and v are of other sequences")
            }
            _ => {}
        }
        if self.window == Some(0) {
            bail!(
                "AttentionSpec: a window must be at least 1, the query's own position, got 0\nhint: None is attention to all positions before"
            )
        }
        self.groups.validate(num_q_heads, num_kv_heads)
    }

    /// If queries and keys are the same whole sequences, their documents if they have several.
    #[cfg(feature = "cuda")]
    pub(crate) fn whole(
        &self,
    ) -> Option<Option<&crate::attention::document_starts::DocumentStarts>> {
        match &self.rows {
            None => Some(None),
            Some(rows) => rows.whole(),
        }
    }

    /// The rectangles that the rows are, if they are, and tensors do not have whole sequences already.
    #[cfg(feature = "cudnn")]
    pub(crate) fn rectangle(&self) -> Option<Rectangle> {
        let rows = self.rows.as_ref()?;
        let are_in_one = rows.queries().dims().0 == 1 && rows.sequences().len() > 1;
        let is_of_parts = rows.whole().is_none() || are_in_one;
        is_of_parts.then(|| rows.known_rectangle(self.window))?
    }

    /// The same for rows of which queries see all that come before.
    #[cfg(feature = "cudnn")]
    pub(crate) fn of_all(&self) -> Self {
        Self {
            window: None,
            rows: None,
            ..self.clone()
        }
    }

    /// How many positions a query of `num_positions` sees at most.
    #[cfg(feature = "cuda")]
    pub(crate) fn window_of(&self, num_positions: usize) -> usize {
        self.window
            .map_or(num_positions, |window| window.min(num_positions))
    }
}
