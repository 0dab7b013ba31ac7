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
    /// Weights once more, [in the orders](crate::PackWeights) in which products read them.
    Packed,
    /// What is [offloaded](crate::Offload) to memory of the host: not on the device.
    Host,
    /// What is offloaded to files: no memory.
    Disk,
}

impl MemoryCategory {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 9] = [
        Self::Weights,
        Self::Gradients,
        Self::Optimizer,
        Self::Activations,
        Self::Gathered,
        Self::Buffers,
        Self::Packed,
        Self::Host,
        Self::Disk,
    ];

    /// Whether it is memory of the device that computes, which on a CPU is the host's.
    pub fn is_on_device(self) -> bool {
        !matches!(self, Self::Host | Self::Disk)
    }
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
            Self::Packed => "packed",
            Self::Host => "host",
            Self::Disk => "disk",
        })
    }
}
