//! A parameter server (Li et al., OSDI 2014): servers divide the parameters and update them, workers compute gradients.
//!
//! ```text
//! worker -> each server    hello
//! server -> worker         start: where the run is, the server's values of each bucket, its weights
//! worker -> each server    push: a step's gradients at these values, its loss
//! server -> worker         reply: updated weights
//! ```
//! A worker waits for the replies of all servers before its next step; when a server gives one is the [`Consistency`].
//! Servers are ranks of a mesh like any other, ZeRO-3 replicas that see no data: they evaluate, save and resume as these do.

mod consistency;
mod message;
mod server;
mod worker;

pub use consistency::{Consistency, Staleness};
pub use server::ParameterServer;
pub use worker::Worker;

pub(crate) use server::{ServedStep, StepDone};
