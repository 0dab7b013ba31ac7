//! What a plan of attention is made for.

/// Sizes of an attention, and its direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Sizes {
    pub(super) b: usize,
    pub(super) t: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) d: usize,
    pub(super) backward: bool,
}

/// Most bytes of a backward pass's partial sums, but for a single sequence that needs more.
const MAX_PARTIAL_BYTES: usize = 1 << 30;

/// Keys of a partial sum, in cuDNN 9.19's deterministic kernel for sm_90.
const KEYS_PER_PARTIAL: usize = 128;

impl Sizes {
    /// Rows of scores.
    pub(super) fn num_rows(&self) -> usize {
        self.b * self.heads * self.t
    }

    /// The same for as many sequences as a call takes: they divide all, and the backward pass's workspace stays small.
    pub(super) fn of_one_call(self) -> Self {
        if !self.backward {
            return self;
        }
        let partials = self.t.div_ceil(KEYS_PER_PARTIAL);
        let bytes = 4 * self.t * self.heads * self.d * partials;
        let most = (MAX_PARTIAL_BYTES / bytes.max(1)).clamp(1, self.b.max(1));
        let b = (1..=most).rev().find(|b| self.b.is_multiple_of(*b));
        Self {
            b: b.unwrap_or(1),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Sizes;

    #[test]
    fn calls_share_all_sequences_and_the_workspace_stays_small() {
        let sizes = |b, t, backward| Sizes {
            b,
            t,
            heads: 32,
            kv_heads: 8,
            d: 64,
            backward,
        };
        for (b, t, backward, of_one_call) in [
            (8, 4096, false, 8),
            (8, 4096, true, 1),
            (8, 2048, true, 4),
            (6, 2048, true, 3),
            (8, 128, true, 8),
            (3, 1 << 20, true, 1),
        ] {
            let call = sizes(b, t, backward).of_one_call();
            assert_eq!(call.b, of_one_call, "{b} sequences of {t}");
        }
    }
}
