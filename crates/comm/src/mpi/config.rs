//! How this process takes part in a run under MPI.

use std::time::Duration;

use crate::MpiReduction;

/// How this process takes part in a run under MPI; see [`launch::mpi`](crate::launch::mpi).
#[derive(Debug, Clone)]
pub struct MpiConfig {
    /// How long one wait may last before it becomes an error, also that of a rank that has returned for those that have not.
    /// Default: 10 minutes.
    pub deadline: Duration,
    /// Threads on which this rank computes. Default: RAYON_NUM_THREADS, or else the cores that this process may use,
    /// divided over the ranks on this host that may use the same ones; at least one.
    pub threads_per_rank: Option<usize>,
    /// Who adds large tensors, the same on all ranks. Default: we do.
    pub reduction: MpiReduction,
    /// Takes every so many ranks in a row for those of one host, so that what ranks do on several hosts can be tried on one.
    /// Default: those that share memory, as MPI says.
    pub ranks_per_host: Option<usize>,
}

impl Default for MpiConfig {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(600),
            threads_per_rank: None,
            reduction: MpiReduction::default(),
            ranks_per_host: None,
        }
    }
}
