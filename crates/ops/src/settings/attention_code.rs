//! Which code computed attention: without cuDNN, or with a shape that it does not take, a step on a GPU is much longer.

use std::fmt::{Display, Formatter};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Code that computes attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionCode {
    /// This crate's, on the CPU.
    Cpu,
    /// This crate's kernels, on a GPU.
    Own,
    /// cuDNN's fused kernels, on a GPU.
    Cudnn,
}

/// Whether each has computed attention in this process.
static USED: [AtomicBool; 3] = [const { AtomicBool::new(false) }; 3];

impl AttentionCode {
    /// What has computed attention in this process so far, forward or backward.
    pub fn used() -> Vec<Self> {
        let all = [Self::Cpu, Self::Own, Self::Cudnn];
        let is_used = |code: &Self| USED[*code as usize].load(Relaxed);
        all.into_iter().filter(is_used).collect()
    }

    /// Tells that it computes attention.
    pub(crate) fn note(self) {
        USED[self as usize].store(true, Relaxed);
    }
}

/// `cpu`, `own` or `cudnn`.
impl Display for AttentionCode {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Cpu => "cpu",
            Self::Own => "own",
            Self::Cudnn => "cudnn",
        })
    }
}
