//! Where an optimizer's state and masters are between updates.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use candle_core::{Error, Result};
use serde::{Deserialize, Serialize};

/// Where an optimizer keeps its state and masters. They pass through the device that computes bucket by bucket; the bits are the same
/// everywhere.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Offload {
    /// On the device that computes.
    #[default]
    None,
    /// In the host's memory. On the CPU that is the same.
    Host,
    /// In a file of this folder, one for each rank, which vanishes with its process. At most two buckets are in memory: the one that
    /// is updated, and the one before or after it, which is written or read meanwhile (arXiv:2104.07857).
    Nvme(PathBuf),
}

impl fmt::Display for Offload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Host => f.write_str("optimizer"),
            Self::Nvme(dir) => write!(f, "nvme:{}", dir.display()),
        }
    }
}

impl FromStr for Offload {
    type Err = Error;

    /// `optimizer` or `nvme:DIR`.
    fn from_str(text: &str) -> Result<Self> {
        match text.split_once(':') {
            None if text == "optimizer" => Ok(Self::Host),
            Some(("nvme", dir)) if !dir.is_empty() => Ok(Self::Nvme(PathBuf::from(dir))),
            _ => Err(Error::Msg(format!(
                "expected `optimizer` or `nvme:DIR`, got `{text}`"
            ))),
        }
    }
}
