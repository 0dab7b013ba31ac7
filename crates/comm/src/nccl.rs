//! The `nccl` backend: each rank has a GPU of its own; ranks are processes, or threads of one.
//!
//! Every group has a communicator of NCCL's and a stream. Starting an operation puts it on that stream, behind what the rank
//! has enqueued so far; waiting makes the stream on which the rank computes wait for it, and for nothing that was started
//! later; for what is only sent it does not wait ([`in_flight`]). The host waits for a barrier only, and for what it reads.
//! NCCL's calls do not block either: what they leave under way on the host is looked after for as long as the deadline allows
//! ([`group`]).
//!
//! So errors come late. A thread ([`watcher`]) looks after what is under way on the GPU, and when NCCL reports an error or a
//! deadline passes it notes the failure and aborts all groups of the rank ([`rank_run`]). Then the GPU goes on, with results
//! that were never written: whoever reads values on the host asks [`Communicator::check`](crate::Communicator::check)
//! before it believes them. Nothing can be started after a failure, and no wait succeeds.
//!
//! NCCL compares nothing. Operations that do not match across ranks hang until the deadline, unless the
//! group is [watched](crate::ProcessGroup::watched) and compares them. Messages in different batches wait for each other: what the `local` backend
//! buffers, two ranks that first send and then, in another batch, receive, hangs.
//!
//! NCCL adds in an order of its own, the same in each run on the same GPUs: with more than two ranks the last bits of sums may
//! differ from those of other backends. [`reduction`] says how sums of half precision and maxima are made.

mod communicator;
mod config;
mod group;
mod in_flight;
mod rank_run;
mod reduction;
mod run;
mod session;
mod sys;
mod transfer;
mod watcher;

pub use communicator::NcclCommunicator;
pub use config::{Exchange, NcclConfig};
pub use run::nccl;
