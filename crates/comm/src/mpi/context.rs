//! What operations need, on MPI's thread and on those that start and await them.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::sys::Mpi;

/// What operations on MPI's thread need.
pub(super) struct Context {
    pub mpi: Mpi,
    pub shared: Arc<Shared>,
}

/// What all threads of a rank know.
pub(super) struct Shared {
    pub world_rank: usize,
    pub deadline: Duration,
    /// The highest tag that MPI allows.
    pub max_tag: c_int,
    /// The groups that this rank has been in, with the world; each has its number here.
    pub num_groups: AtomicI64,
    /// Each rank's last operation, as far as its message came here.
    last_calls: Mutex<Vec<Option<String>>>,
}

impl Shared {
    pub fn new(
        (world_rank, world_size): (usize, usize),
        deadline: Duration,
        max_tag: c_int,
    ) -> Self {
        Self {
            world_rank,
            deadline,
            max_tag,
            num_groups: AtomicI64::new(1),
            last_calls: Mutex::new(vec![None; world_size]),
        }
    }

    /// Notes what a rank has called.
    pub fn note(&self, rank: usize, operation: String) {
        let mut last = (self.last_calls.lock()).unwrap_or_else(PoisonError::into_inner);
        last[rank] = Some(operation);
    }

    /// Each rank's last operation, one line per rank.
    pub fn report(&self) -> String {
        let last = (self.last_calls.lock()).unwrap_or_else(PoisonError::into_inner);
        let lines = last.iter().enumerate().map(|(rank, last)| {
            let said = match (last, rank == self.world_rank) {
                (Some(last), true) => last,
                (Some(last), false) => &format!("{last}, as last heard here"),
                (None, true) => "has started no operation",
                (None, false) => "nothing was heard of it here",
            };
            format!("  rank {rank}: {said}")
        });
        lines.collect::<Vec<_>>().join("\n")
    }
}
