//! What operations on MPI's thread need.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::hosts::Hosts;
use super::sys::{Comm, Mpi};
use crate::Error;

/// MPI, and the groups that this rank is in.
pub(super) struct Context {
    pub mpi: Mpi,
    pub world_rank: usize,
    pub deadline: Duration,
    pub last_calls: Arc<LastCalls>,
    /// The world is the first.
    pub groups: Vec<Group>,
}

impl Context {
    /// Makes a group of these ranks of `group`, and returns its number. MPI waits in it for all ranks of `group`.
    pub fn split(&mut self, group: usize, ranks: &[usize]) -> Result<usize, Error> {
        let parent = &self.groups[group];
        // Each new group is named by its lowest rank.
        let color = ranks.iter().min().copied().unwrap_or(parent.rank);
        let rank = ranks.iter().position(|rank| *rank == parent.rank);
        let rank = rank.unwrap_or(0);
        let comm = self.mpi.split(parent.comm, color, rank)?;
        let (mpi_rank, mpi_size) = (self.mpi.rank(comm)?, self.mpi.size(comm)?);
        if (mpi_rank, mpi_size) != (rank, ranks.len()) {
            return Err(Error::Backend(format!(
                "MPI_Comm_split made this rank number {mpi_rank} of {mpi_size}, expected {rank} of {}",
                ranks.len()
            )));
        }
        let group = Group {
            comm,
            members: ranks.iter().map(|rank| parent.members[*rank]).collect(),
            rank,
            hosts: Arc::new(parent.hosts.of_group(ranks)),
        };
        self.groups.push(group);
        Ok(self.groups.len() - 1)
    }
}

/// A group that this rank is in.
#[derive(Clone)]
pub(super) struct Group {
    pub comm: Comm,
    /// The world ranks, by group rank.
    pub members: Arc<[usize]>,
    /// This rank in the group.
    pub rank: usize,
    pub hosts: Arc<Hosts>,
}

impl Group {
    /// The group ranks of the others, from the next one on.
    pub fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, world_size) = (self.rank, self.members.len());
        (1..world_size).map(move |step| (rank + step) % world_size)
    }
}

/// Each rank's last operation, as far as its message came here.
pub(super) struct LastCalls {
    own_rank: usize,
    last: Mutex<Vec<Option<String>>>,
}

impl LastCalls {
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
