//! The `mpi` backend: each rank is a process, on the CPU, under MPI (Open MPI or MPICH).
//!
//! Starting an operation hands it to MPI's thread and returns. That thread alone calls MPI: it posts sends and receives
//! that do not block, polls for completed ones, reduces, and sleeps ever longer while it is idle.
//!
//! ```text
//! communicator -> engine -> collective -> meeting             first messages: do all ranks call the same?
//!                        |             -> movement -> route   data of large collectives
//!                        -> channels                          messages between two ranks
//! ```
//! MPI reduces in whatever order it likes, so it only moves bytes here. Reductions are those of the local backend, in the same order, with the
//! same bits; [`route`] says which rank makes which part, so that no host's card carries more than it has to.
//!
//! Memory that MPI works on is owned by the call ([`transfer`]), and given back when it is complete.
//! All groups share one communicator of MPI ([`group`]). Messages are bytes: the hosts must have the same byte order.

mod buffer;
mod channels;
mod collective;
mod communicator;
mod context;
mod engine;
mod environment;
mod group;
mod header;
mod in_flight;
mod meeting;
mod movement;
mod pause;
mod route;
mod run;
mod shutdown;
mod step;
mod sys;
mod transfer;

pub use run::{MpiConfig, mpi};

type Result<T> = std::result::Result<T, crate::Error>;
