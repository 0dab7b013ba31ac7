//! How often each operation ran and how many bytes it moved.

use std::collections::BTreeMap;

/// Calls of one operation and the bytes they moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpCount {
    /// Number of calls.
    pub calls: u64,
    /// Bytes this rank sends in a ring, as listed at [`Counters`].
    pub bytes: u64,
}

/// A snapshot of what a [`ProcessGroup`](crate::ProcessGroup) has done, by operation name.
///
/// `N` is the number of ranks. Bytes are those that a ring algorithm moves per rank, rounded down to whole bytes:
///
/// | operation | bytes per call |
/// |---|---|
/// | `all_reduce` | `2 (N-1)/N *` size |
/// | `all_gather`, `all_gather_bytes` | `(N-1)/N *` output size |
/// | `reduce_scatter` | `(N-1)/N *` input size |
/// | `broadcast`, `all_to_all`, `reduce` | `(N-1)/N *` size |
/// | `scatter` | on the root what the others get, on them 0 |
/// | `gather` | on the root 0, on the others their size |
/// | `batch_send_recv` | the size of the sends |
/// | `barrier` | 0 |
///
/// Sizes are those of the values on their way. Threads and MPI send them as they are (between hosts MPI may send f32). NCCL sends bf16 and f16 as f32
/// unless their sums are [`HalfSums::Native`](crate::HalfSums), and with each value of a maximum or minimum of floats a byte that says whether it is NaN.
///
/// A group of one counts nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counters {
    ops: BTreeMap<&'static str, OpCount>,
}

impl Counters {
    /// The count of one operation; zeros if it never ran.
    pub fn get(&self, operation: &str) -> OpCount {
        self.ops.get(operation).copied().unwrap_or_default()
    }

    /// Number of calls of one operation.
    pub fn calls(&self, operation: &str) -> u64 {
        self.get(operation).calls
    }

    /// Bytes moved by one operation.
    pub fn bytes(&self, operation: &str) -> u64 {
        self.get(operation).bytes
    }

    /// Calls and bytes of all operations together.
    pub fn total(&self) -> OpCount {
        self.ops
            .values()
            .fold(OpCount::default(), |sum, op| OpCount {
                calls: sum.calls + op.calls,
                bytes: sum.bytes + op.bytes,
            })
    }

    /// Every operation that ran, in name order.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, OpCount)> + '_ {
        self.ops.iter().map(|(name, count)| (*name, *count))
    }

    pub(crate) fn add(&mut self, operation: &'static str, bytes: u64) {
        let count = self.ops.entry(operation).or_default();
        count.calls += 1;
        count.bytes += bytes;
    }
}
