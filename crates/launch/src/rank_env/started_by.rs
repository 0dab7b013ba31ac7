//! Which launcher started this process, for messages.

use std::fmt;

/// The launcher whose variables said who this process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartedBy {
    /// Nobody: no launcher's variables are set, the process is alone.
    Nobody,
    /// `candle-train launch`.
    CandleTrain,
    /// `torchrun`, or `accelerate launch`, which runs it.
    Torchrun,
    /// RANK and WORLD_SIZE were set by something else, for example by hand.
    Variables,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// A launcher that speaks PMI: `mpirun` of MPICH or Intel MPI, `srun --mpi=pmi2`.
    Pmi,
    /// Slurm's `srun`.
    Slurm,
}

impl StartedBy {
    /// Whether processes that it starts find each other by MPI.
    pub fn speaks_mpi(self) -> bool {
        matches!(self, Self::OpenMpi | Self::Pmi | Self::Slurm)
    }
}

impl fmt::Display for StartedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nobody => "no launcher",
            Self::CandleTrain => "candle-train launch",
            Self::Torchrun => "torchrun",
            Self::Variables => "the variables RANK and WORLD_SIZE",
            Self::OpenMpi => "Open MPI's mpirun",
            Self::Pmi => "a PMI launcher (MPICH's or Intel's mpirun)",
            Self::Slurm => "Slurm's srun",
        })
    }
}
