//! Ranks talking to ranks: communicators, process groups, meshes and launching.
//!
//! A *rank* is one worker of a parallel run. Ranks of a [`ProcessGroup`] exchange tensors with collectives, each of
//! which exists in a blocking form (`all_reduce`) and in a started form (`start_all_reduce`) that returns a
//! [`Pending`] result, so that communication can run under computation. A [`Mesh`] splits the world into the groups
//! of the pp, dp, cp and tp axes. Backends implement [`Communicator`]; the built-in one joins threads of one process:
//!
//! ```
//! use candle_comm::{ReduceOp, launch};
//! use candle_core::{Device, Tensor};
//!
//! let sums = launch::threads(4, |world| {
//!     let mine = Tensor::new(&[world.rank() as f32], &Device::Cpu)?;
//!     world.all_reduce(&mine, ReduceOp::Sum)?.to_vec1::<f32>()
//! })?;
//! assert_eq!(sums, vec![vec![6.0]; 4]);
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! With [`LocalConfig::devices`] ranks are on GPUs, several on one if need be.
//!
//! Nothing hangs for ever: operations that do not match across ranks, ranks that fail, panic or leave early, and
//! waits that outlast the deadline all become errors that name ranks, operations and call sites. A rank that goes on computing after
//! another one has failed ends with the process, which says so: threads after [`LocalConfig::abort_after`], processes after a second.
#![deny(unsafe_code)]

mod backend;
mod choices;
mod communicator;
mod cores;
mod counters;
mod deadline;
mod error;
pub mod launch;
mod local;
mod mailbox;
mod memory;
mod mesh;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "nccl")]
mod nccl;
mod operation;
mod process_group;
mod reduction;
pub mod trace;

pub use backend::Backend;
pub use candle_launch::{Fingerprint, RankEnv};
pub use choices::HalfSums;
pub use communicator::{Communicator, Request};
pub use cores::start_threads;
pub use counters::{Counters, OpCount};
pub use error::{Error, message_of};
pub use launch::run_config::RunConfig;
pub use local::LocalConfig;
pub use mailbox::{Departure, Mail, Mailbox, MailboxConfig, Received};
pub use memory::adopted::{MIN_ADOPTED_BYTES, adopted_bytes, allocate_for, allocated_of_rank};
pub use mesh::{Degrees, Mesh};
#[cfg(feature = "mpi")]
pub use mpi::MpiConfig;
#[cfg(feature = "nccl")]
pub use nccl::{Exchange, NcclCommunicator, NcclConfig};
pub use operation::pending::{Pending, hidden, waited};
pub use operation::scope::Scope;
pub use operation::{Message, Operation, P2p, ReduceOp};
pub use process_group::ProcessGroup;
pub use reduction::pairwise::sum_in_order;
