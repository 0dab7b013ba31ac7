//! What a plan of attention is made for.

use crate::attention::rectangle::Mask;
use candle_core::DType;
use std::fmt::{Display, Formatter};

/// Which pass, and how it adds up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Direction {
    Forward,
    /// The queries' gradient is added up in one f32 tensor, in the order in which blocks come to it.
    Backward,
    /// The queries' gradient is added up in a fixed order, from the gradients of all scores, which lie in the workspace in 16 bits.
    DeterministicBackward,
}

/// For the log.
impl Display for Direction {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Forward => "forward",
            Self::Backward => "backward, added up as it comes (--deterministic: in a fixed order)",
            Self::DeterministicBackward => "backward, added up in a fixed order",
        })
    }
}

/// Sizes of an attention, and its pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Sizes {
    pub(super) pass: Direction,
    /// Of queries, keys and values: bf16 or f16.
    pub(super) dtype: DType,
    /// Sequences, or documents.
    pub(super) b: usize,
    /// Queries of a sequence, or the most of a document.
    pub(super) t: usize,
    /// Its keys.
    pub(super) num_keys: usize,
    pub(super) mask: Mask,
    /// If the sequences are packed documents.
    pub(super) packed: Option<Packed>,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) d: usize,
    /// Positions that a query sees, where they are fewer than all.
    pub(super) window: Option<usize>,
}

/// Documents of different lengths, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Packed {
    /// Of all documents.
    pub(super) tokens: usize,
    /// Whether statistics, and sums of gradients, have a place for each token; else each document has as many places as the longest.
    pub(super) is_by_token: bool,
}

/// Most bytes that a call may take beside its tensors, but for a single sequence that needs more.
const MAX_SCRATCH_BYTES: usize = 2 << 30;

impl Sizes {
    /// Tokens, if statistics and sums have a place for each, of packed documents.
    pub(super) fn packed_by_token(&self) -> Option<usize> {
        let packed = self.packed?;
        packed.is_by_token.then_some(packed.tokens)
    }

    /// Rows of scores that have a place in memory.
    pub(super) fn num_rows(&self) -> usize {
        self.packed_by_token().unwrap_or(self.b * self.t) * self.heads
    }

    /// Values of the f32 tensor in which the queries' gradient is added up.
    pub(super) fn num_sums(&self) -> usize {
        match self.pass {
            Direction::Backward => self.num_rows() * self.d,
            Direction::Forward | Direction::DeterministicBackward => 0,
        }
    }

    /// Values of each tensor of gradients of keys or values of each head of queries, where it is in memory and no part of the
    /// workspace.
    pub(super) fn num_head_grads(&self) -> usize {
        let is_in_memory = self.packed_by_token().is_some() && self.heads != self.kv_heads;
        match self.pass {
            Direction::Backward | Direction::DeterministicBackward if is_in_memory => {
                self.num_rows() * self.d
            }
            _ => 0,
        }
    }

    /// Bytes of what lies in memory beside the call's tensors and the workspace.
    pub(super) fn bytes_beside_workspace(&self) -> usize {
        4 * self.num_sums() + 2 * 2 * self.num_head_grads()
    }

    /// The same sizes but for as many sequences as a call takes, if the workspace for all of them is that large: they divide all.
    /// Calls over some of the documents share what lies beside the workspace, if it is for all tokens.
    pub(super) fn of_one_call(self, workspace_bytes: usize) -> Self {
        let bytes = match self.packed_by_token() {
            None => workspace_bytes + self.bytes_beside_workspace(),
            Some(_) => workspace_bytes,
        };
        let bytes_each = (bytes / self.b.max(1)).max(1);
        let most = (MAX_SCRATCH_BYTES / bytes_each).clamp(1, self.b.max(1));
        let b = (1..=most).rev().find(|b| self.b.is_multiple_of(*b));
        Self {
            b: b.unwrap_or(1),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{DType, Direction, Mask, Packed, Sizes};

    const SIZES: Sizes = Sizes {
        pass: Direction::Backward,
        dtype: DType::BF16,
        b: 6,
        t: 2048,
        num_keys: 2048,
        mask: Mask::Causal,
        packed: None,
        heads: 32,
        kv_heads: 8,
        d: 64,
        window: None,
    };

    #[test]
    fn calls_share_all_sequences_and_scratch_memory_stays_small() {
        let workspace = Sizes {
            pass: Direction::DeterministicBackward,
            ..SIZES
        };
        for (scratch_gib, of_one_call) in [(0, 6), (2, 6), (3, 3), (4, 3), (6, 2), (12, 1), (99, 1)]
        {
            let call = workspace.of_one_call(scratch_gib << 30);
            assert_eq!(call.b, of_one_call, "{scratch_gib} GiB for all");
        }
        // Sums for each sequence, of 16 MiB, leave less to the workspace.
        assert_eq!(SIZES.of_one_call(2 << 30).b, 3);
        let packed = Sizes {
            packed: Some(Packed {
                tokens: 6 * 2048,
                is_by_token: true,
            }),
            ..SIZES
        };
        assert_eq!(packed.of_one_call(2 << 30).b, 6);
        let padded = Sizes {
            packed: Some(Packed {
                tokens: 1000,
                is_by_token: false,
            }),
            ..SIZES
        };
        assert_eq!(padded.of_one_call(2 << 30).b, 3);
    }

    #[test]
    fn only_some_passes_have_tensors_beside_the_workspace() {
        let bytes = |pass| Sizes { pass, ..SIZES }.bytes_beside_workspace();
        assert_eq!(bytes(Direction::Forward), 0);
        assert_eq!(bytes(Direction::DeterministicBackward), 0);
        assert_eq!(bytes(Direction::Backward), 4 * 6 * 2048 * 32 * 64);
        let packed = |pass, kv_heads, is_by_token| {
            let packed = Packed {
                tokens: 1000,
                is_by_token,
            };
            let sizes = Sizes {
                pass,
                kv_heads,
                packed: Some(packed),
                ..SIZES
            };
            sizes.bytes_beside_workspace()
        };
        assert_eq!(packed(Direction::Forward, 8, true), 0);
        assert_eq!(packed(Direction::Backward, 32, true), 4 * 1000 * 32 * 64);
        assert_eq!(packed(Direction::Backward, 8, true), 8 * 1000 * 32 * 64);
        assert_eq!(
            packed(Direction::DeterministicBackward, 8, true),
            4 * 1000 * 32 * 64
        );
        assert_eq!(
            packed(Direction::Backward, 8, false),
            4 * 6 * 2048 * 32 * 64
        );
    }
}
