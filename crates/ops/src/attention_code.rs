//! Which code computed attention: without cuDNN, or with a shape that it does not take, a step on a GPU is much longer.

use crate::GpuSettings;
use candle_core::{DType, Device, Result};
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

    /// What computes attention of values of this type on this device, where queries and keys are whole sequences or parts of them that see all of each
    /// other, of sizes that cuDNN takes; others are left to [`Self::Own`].
    ///
    /// # Errors
    /// When a variable has a value that means nothing.
    pub fn of_whole(device: &Device, dtype: DType) -> Result<Self> {
        if device.is_cpu() {
            return Ok(Self::Cpu);
        }
        let is_refused = GpuSettings::get()?.attention == Some(Self::Own);
        let is_narrow = matches!(dtype, DType::BF16 | DType::F16);
        #[cfg(feature = "cudnn")]
        let is_there = crate::cuda::has_cudnn();
        #[cfg(not(feature = "cudnn"))]
        let is_there = false;
        Ok(match is_there && is_narrow && !is_refused {
            true => Self::Cudnn,
            false => Self::Own,
        })
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
