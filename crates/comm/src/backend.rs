//! What moves tensors between ranks.

use candle_launch::RankEnv;

use crate::choices::named;

/// What moves tensors between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
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
}

named!(Backend, "as backend", Local "local", Mpi "mpi", Nccl "nccl");
