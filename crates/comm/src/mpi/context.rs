//! What operations on MPI's thread need.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::addresses::Addresses;
use super::hosts::Hosts;
use super::native::NativeGroup;
use super::sys::{Comm, Mpi};

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
    /// Opens a group of this rank; nothing is said to the others.
    pub fn open(&mut self, group: usize, opened: Opened) {
        while self.groups.len() <= group {
            // Numbers between may be those of groups that are being split off.
            self.groups.push(Group {
                comm: Comm(self.groups.len()),
                members: Arc::new([]),
                rank: 0,
                native: None,
                hosts: Arc::new(Hosts::new(&[])),
            });
        }
        let Opened {
            addresses,
            rank,
            native,
        } = opened;
        let (comm, members) = (Comm(group), addresses.members.clone());
        self.groups[group] = Group {
            comm,
            hosts: Arc::new(self.groups[0].hosts.of_group(&members)),
            members,
            rank,
            native,
        };
        self.mpi.open(comm, addresses);
    }
}

/// A new group, as this rank opens it.
pub(super) struct Opened {
    pub addresses: Addresses,
    /// This rank in it.
    pub rank: usize,
    pub native: Option<NativeGroup>,
}

/// A group that this rank is in.
#[derive(Clone)]
pub(super) struct Group {
    pub comm: Comm,
    /// The world ranks, by group rank.
    pub members: Arc<[usize]>,
    /// This rank in the group.
    pub rank: usize,
    /// Where MPI adds by itself.
    pub native: Option<NativeGroup>,
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
