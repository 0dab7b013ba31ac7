//! The device that a program was asked to run on.

use candle_core::{Device, Error, Result};
use std::fmt;
use std::str::FromStr;

/// A device by name: `cpu`, `cuda` (all GPUs) or `cuda:N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The host's processor and memory.
    Cpu,
    /// Every GPU that CUDA shows.
    AllCuda,
    /// A GPU by its number among those that CUDA shows, from 0.
    Cuda(usize),
}

impl DeviceChoice {
    /// All GPUs if this build has CUDA, else the CPU.
    pub fn preferred() -> Self {
        if cfg!(feature = "cuda") {
            Self::AllCuda
        } else {
            Self::Cpu
        }
    }

    /// Opens the device, of several the first. A GPU gets one stream for all threads that use it, keeps the memory it frees for the next
    /// allocation, and records no event per tensor: whoever hands a tensor to another stream orders the two streams.
    ///
    /// # Errors
    /// When this build has no CUDA, one of its libraries could not be loaded (the message says which), there is no such
    /// GPU, or it fails to start.
    pub fn open(self) -> Result<Device> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::AllCuda => open_cuda(0),
            Self::Cuda(ordinal) => open_cuda(ordinal),
        }
    }

    /// How many devices it means, as far as that can be told without one: 0 without a GPU.
    pub fn num_devices(self) -> usize {
        match self {
            Self::AllCuda => num_gpus(),
            Self::Cpu | Self::Cuda(_) => 1,
        }
    }

    /// Opens what `num_ranks` ranks need, one or more devices, which they take in turn.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_for(self, num_ranks: usize) -> Result<Vec<Device>> {
        let count = self.num_devices().clamp(1, num_ranks.max(1));
        let first = std::iter::once(self.open());
        first.chain((1..count).map(open_cuda)).collect()
    }

    /// Opens the device of a process that is the `local_rank`-th of its host: of all GPUs, the one of that number, or in turn
    /// if the process is shown fewer.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_for_process(self, local_rank: usize) -> Result<Device> {
        match self {
            Self::AllCuda => open_cuda(local_rank % num_gpus().max(1)),
            Self::Cpu | Self::Cuda(_) => self.open(),
        }
    }
}

#[cfg(feature = "cuda")]
use crate::cuda::device::{num_gpus, open as open_cuda};

#[cfg(not(feature = "cuda"))]
fn num_gpus() -> usize {
    0
}

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
            Self::AllCuda => write!(f, "cuda"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let choice = match name {
            "cpu" => Some(Self::Cpu),
            "cuda" => Some(Self::AllCuda),
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
