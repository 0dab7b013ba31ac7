//! The tests of candle-comm. `conformance` holds what every backend must pass, as functions over a way to launch ranks.

#[path = "comm/adopted.rs"]
mod adopted;
#[macro_use]
#[path = "comm/conformance/mod.rs"]
mod conformance;
#[cfg(feature = "cuda")]
#[path = "comm/cuda.rs"]
mod cuda;
#[cfg(feature = "cuda")]
#[path = "comm/cuda_ranks.rs"]
mod cuda_ranks;
#[path = "comm/determinism.rs"]
mod determinism;
#[path = "comm/ends.rs"]
mod ends;
#[path = "comm/failures.rs"]
mod failures;
#[path = "comm/local.rs"]
mod local;
#[path = "comm/mailbox.rs"]
mod mailbox;
#[path = "comm/mailbox_ends.rs"]
mod mailbox_ends;
#[path = "comm/mesh.rs"]
mod mesh;
#[path = "comm/mismatches.rs"]
mod mismatches;
#[cfg(feature = "mpi")]
#[path = "comm/mpi.rs"]
mod mpi;
#[cfg(feature = "mpi")]
#[path = "comm/mpi_bits.rs"]
mod mpi_bits;
#[cfg(feature = "mpi")]
#[path = "comm/mpi_groups.rs"]
mod mpi_groups;
#[cfg(feature = "mpi")]
#[path = "comm/mpirun.rs"]
mod mpirun;
#[cfg(feature = "nccl")]
#[path = "comm/nccl.rs"]
mod nccl;
#[cfg(feature = "nccl")]
#[path = "comm/nccl_failures.rs"]
mod nccl_failures;
#[cfg(feature = "nccl")]
#[path = "comm/nccl_ranks.rs"]
mod nccl_ranks;
#[path = "comm/reference.rs"]
mod reference;
#[path = "comm/threads.rs"]
mod threads;
#[path = "comm/trace.rs"]
mod trace;
#[path = "comm/watched.rs"]
mod watched;
