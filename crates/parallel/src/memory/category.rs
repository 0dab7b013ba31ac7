//! What memory is held for.

use std::fmt;

/// What a rank holds memory for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryCategory {
    /// Values of parameters that the rank keeps between uses: whole, or its slices of them.
    Weights,
    /// Accumulators of gradients that it keeps: whole buckets, or its slices of them.
    Gradients,
    /// State of the optimizer, and master weights or their remainders.
    Optimizer,
    /// What the tape keeps between passes: what has been allocated since the passes of a step began and is held as nothing else,
    /// looked at after each block's passes, when what it computed with is gone. On the CPU
    /// [`count_memory_with`](crate::count_memory_with) tells; ranks on one GPU count each other's.
    Activations,
    /// Weights that were gathered for use and are freed after it.
    Gathered,
    /// Buffers that exist for communication alone.
    Buffers,
}

impl MemoryCategory {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 6] = [
        Self::Weights,
        Self::Gradients,
        Self::Optimizer,
        Self::Activations,
        Self::Gathered,
        Self::Buffers,
    ];
}

impl fmt::Display for MemoryCategory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Weights => "weights",
            Self::Gradients => "gradients",
            Self::Optimizer => "optimizer",
            Self::Activations => "activations",
            Self::Gathered => "gathered",
            Self::Buffers => "buffers",
        })
    }
}
