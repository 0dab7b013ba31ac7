//! The tests of candle-comm. `conformance` holds what every backend must pass, as functions over a way to launch ranks.

mod adopted;
#[macro_use]
mod conformance;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod cuda_ranks;
mod determinism;
mod ends;
mod failures;
mod local;
mod mailbox;
mod mailbox_ends;
mod mesh;
mod mismatches;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "mpi")]
mod mpi_bits;
#[cfg(feature = "mpi")]
mod mpi_groups;
#[cfg(feature = "mpi")]
mod mpirun;
#[cfg(feature = "nccl")]
mod nccl;
#[cfg(feature = "nccl")]
mod nccl_failures;
#[cfg(feature = "nccl")]
mod nccl_ranks;
mod reference;
mod threads;
mod trace;
mod watched;
