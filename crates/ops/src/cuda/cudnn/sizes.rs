//! What a plan of attention is made for.

use candle_core::DType;
use std::fmt::{Display, Formatter};

/// Which pass, and how it adds up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Pass {
    Forward,
    /// The queries' gradient is added up in one f32 tensor, in the order in which blocks come to it.
    Backward,
    /// The queries' gradient is added up in a fixed order, from the gradients of all scores, which lie in the workspace in 16 bits.
    DeterministicBackward,
}

/// For the log.
impl Display for Pass {
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
    pub(super) pass: Pass,
    /// Of queries, keys and values: bf16 or f16.
    pub(super) dtype: DType,
    pub(super) b: usize,
    pub(super) t: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) d: usize,
    /// Positions that a query sees, where they are fewer than all.
    pub(super) window: Option<usize>,
}

/// Most bytes that a call may take beside its tensors, but for a single sequence that needs more.
const MAX_SCRATCH_BYTES: usize = 2 << 30;

impl Sizes {
    /// Rows of scores.
    pub(super) fn num_rows(&self) -> usize {
        self.b * self.heads * self.t
    }

    /// Values of the f32 tensor in which the queries' gradient is added up.
    pub(super) fn num_sums(&self) -> usize {
        match self.pass {
            Pass::Backward => self.num_rows() * self.d,
            Pass::Forward | Pass::DeterministicBackward => 0,
        }
    }

    /// Bytes of that tensor and of a workspace.
    pub(super) fn scratch_bytes(&self, workspace_bytes: usize) -> usize {
        4 * self.num_sums() + workspace_bytes
    }

    /// The same for as many sequences as a call takes, if one for all of them takes `scratch_bytes`: they divide all.
    pub(super) fn of_one_call(self, scratch_bytes: usize) -> Self {
        let bytes_each = (scratch_bytes / self.b.max(1)).max(1);
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
    use super::{DType, Pass, Sizes};

    const SIZES: Sizes = Sizes {
        pass: Pass::Backward,
        dtype: DType::BF16,
        b: 6,
        t: 2048,
        heads: 32,
        kv_heads: 8,
        d: 64,
        window: None,
    };

    #[test]
    fn calls_share_all_sequences_and_scratch_memory_stays_small() {
        for (scratch_gib, of_one_call) in [(0, 6), (2, 6), (3, 3), (4, 3), (6, 2), (12, 1), (99, 1)]
        {
            let call = SIZES.of_one_call(scratch_gib << 30);
            assert_eq!(call.b, of_one_call, "{scratch_gib} GiB for all");
        }
    }

    #[test]
    fn only_the_pass_in_no_fixed_order_has_a_tensor_of_sums() {
        let bytes = |pass| Sizes { pass, ..SIZES }.scratch_bytes(1000);
        assert_eq!(bytes(Pass::Forward), 1000);
        assert_eq!(bytes(Pass::DeterministicBackward), 1000);
        assert_eq!(bytes(Pass::Backward), 1000 + 4 * 6 * 2048 * 32 * 64);
    }
}
