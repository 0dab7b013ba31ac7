//! What moves tensors between ranks.

use std::str::FromStr;

use candle_launch::RankEnv;

use crate::Error;

/// What moves tensors between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// Memory: all ranks are threads of this process.
    Local,
    /// MPI: each rank is a process, with its tensors on the CPU. Needs the feature `mpi`.
    Mpi,
    /// NCCL: each rank is a process with a GPU. Needs the feature `nccl`.
    Nccl,
}

impl Backend {
    /// What fits a process of this environment: threads if it is alone, else NCCL on GPUs and MPI on CPUs.
    pub fn preferred(env: &RankEnv, on_gpus: bool) -> Self {
        match (env.world_size(), on_gpus) {
            (1, _) => Self::Local,
            (_, true) => Self::Nccl,
            (_, false) => Self::Mpi,
        }
    }

    /// Whether this build has it.
    pub fn is_built(self) -> bool {
        match self {
            Self::Local => true,
            Self::Mpi => cfg!(feature = "mpi"),
            Self::Nccl => cfg!(feature = "nccl"),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Mpi => "mpi",
            Self::Nccl => "nccl",
        }
    }
}

impl std::fmt::Display for Backend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Backend {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        [Self::Local, Self::Mpi, Self::Nccl]
            .into_iter()
            .find(|backend| backend.name() == name)
            .ok_or_else(|| {
                Error::Argument(format!(
                    "expected local, mpi or nccl as backend, got {name:?}"
                ))
            })
    }
}
