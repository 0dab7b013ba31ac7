//! What a rank keeps away from the device that computes, in the host's memory or in files, and how it comes and goes.

mod column;
mod config;
mod file_store;
mod host_store;
mod store;
mod waiting;

pub(crate) use column::Column;
pub use config::Offload;
pub(crate) use config::OffloadPlace;
pub(crate) use store::{Fetched, Kept, OffloadStore, num_bytes_of};
pub(crate) use waiting::{Lane, Stored, WaitingStore};
