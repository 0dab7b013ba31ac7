//! What this rank has heard of each other rank last, for reports.

use std::sync::{Mutex, PoisonError};

/// Each rank's last operation, as far as its message came here.
pub(super) struct Heard {
    own_rank: usize,
    last: Mutex<Vec<Option<String>>>,
}

impl Heard {
    pub fn new(own_rank: usize, world_size: usize) -> Self {
        Self {
            own_rank,
            last: Mutex::new(vec![None; world_size]),
        }
    }

    /// Notes what a rank has called.
    pub fn note(&self, rank: usize, operation: String) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = last.get_mut(rank) {
            *last = Some(operation);
        }
    }

    /// One line per rank.
    pub fn report(&self) -> String {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let lines: Vec<String> = last
            .iter()
            .enumerate()
            .map(|(rank, last)| match last {
                Some(last) if rank == self.own_rank => format!("  rank {rank}: {last}"),
                Some(last) => format!("  rank {rank}: {last}, as last heard here"),
                None if rank == self.own_rank => {
                    format!("  rank {rank}: has started no operation")
                }
                None => format!("  rank {rank}: nothing was heard of it here"),
            })
            .collect();
        lines.join("\n")
    }
}
