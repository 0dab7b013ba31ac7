//! What operations on MPI's thread need.

use std::sync::Arc;
use std::time::Duration;

use super::heard::Heard;
use super::sys::{Comm, Mpi};

/// MPI, and the groups that this rank is in.
pub(super) struct Context {
    pub mpi: Mpi,
    pub world_rank: usize,
    pub deadline: Duration,
    pub heard: Arc<Heard>,
    /// The world is the first.
    pub groups: Vec<Group>,
}

/// A group that this rank is in.
#[derive(Clone)]
pub(super) struct Group {
    pub comm: Comm,
    /// The world ranks, by group rank.
    pub members: Arc<[usize]>,
    /// This rank in the group.
    pub rank: usize,
}

impl Group {
    /// The group ranks of the others, from the next one on.
    pub fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, world_size) = (self.rank, self.members.len());
        (1..world_size).map(move |step| (rank + step) % world_size)
    }
}
