//! The `mpi` backend: each rank is a process, on the CPU, under MPI (Open MPI or MPICH).
//!
//! Starting an operation hands it to MPI's thread and returns. That thread alone calls MPI: it posts sends and receives
//! that do not block, polls for completed ones, reduces, and sleeps ever longer while it is idle.
//!
//! ```text
//! communicator -> engine -> collective -> meeting    first messages: do all ranks call the same?
//!                        |             -> movement   data of collectives, along a route
//!                        -> channels -> inbox        messages between two ranks
//! ```
//! MPI reduces in whatever order it likes, so it only moves bytes here. Reductions are those of the local backend, in rank
//! order, with the same bits; [`route`] says which rank makes which part, so that the bytes are those of a ring.
//!
//! Memory that MPI works on is owned by the message ([`transfer`]), and given back when it is complete.
//! Each group has a communicator of MPI's own. Messages are bytes: the hosts must have the same byte order.

mod channels;
mod collective;
mod communicator;
mod config;
mod context;
mod engine;
mod environment;
mod gathering;
mod header;
mod in_flight;
mod inbox;
mod meeting;
mod messages;
mod movement;
mod part;
mod pause;
mod place;
mod route;
mod run;
mod shutdown;
mod sys;
mod tags;
mod transfer;

pub use config::MpiConfig;
pub use run::mpi;

use crate::bytes;
