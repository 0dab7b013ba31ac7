//! The device that a program was asked to run on.

use candle_core::{Device, Error, Result};
use std::fmt;
use std::str::FromStr;

/// A device by name: `cpu`, `cuda` (the first GPU) or `cuda:N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The host's processor and memory.
    Cpu,
    /// A GPU by its number among those that CUDA shows, from 0.
    Cuda(usize),
}

impl DeviceChoice {
    /// The first GPU if this build has CUDA, else the CPU.
    pub fn preferred() -> Self {
        if cfg!(feature = "cuda") {
            Self::Cuda(0)
        } else {
            Self::Cpu
        }
    }

    /// Opens the device. A GPU gets one stream for all threads that use it, keeps the memory it frees for the next
    /// allocation, and records no event per tensor: whoever hands a tensor to another stream orders the two streams.
    ///
    /// # Errors
    /// When this build has no CUDA, one of its libraries could not be loaded (the message says which), there is no such
    /// GPU, or it fails to start.
    pub fn open(self) -> Result<Device> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Cuda(ordinal) => open_cuda(ordinal),
        }
    }
}

#[cfg(feature = "cuda")]
use crate::cuda::open as open_cuda;

#[cfg(not(feature = "cuda"))]
fn open_cuda(_ordinal: usize) -> Result<Device> {
    candle_core::bail!(
        "this program was built without CUDA\nhint: build it with `--features cuda`, or by scripts/cuda-build.sh"
    )
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => write!(f, "cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let choice = match name {
            "cpu" => Some(Self::Cpu),
            "cuda" => Some(Self::Cuda(0)),
            _ => name
                .strip_prefix("cuda:")
                .filter(|ordinal| ordinal.bytes().all(|byte| byte.is_ascii_digit()))
                .and_then(|ordinal| ordinal.parse().ok())
                .map(Self::Cuda),
        };
        choice.ok_or_else(|| {
            Error::Msg(format!(
                "expected a device `cpu`, `cuda` or `cuda:N`, got `{name}`"
            ))
        })
    }
}
