//! The `local` backend: the ranks are threads of one process, on the CPU or on GPUs.
//!
//! Starting an operation deposits the input and returns. The last rank to arrive does the work for everybody: small
//! operations on the spot, large ones in a background job, so that they progress while the ranks compute. One pass reads
//! the inputs, combines them [pairwise](crate::reduction::pairwise) and writes one output per rank, into a new tensor or one that the rank has given.
//!
//! All waiting is on condition variables over one lock that guards the bookkeeping of the whole world; data is never
//! touched under it, except when an input is given up before the other ranks have arrived.
//!
//! On GPUs nothing waits for a GPU, and the work, being only enqueued, is always done on the spot. All ranks on a GPU use
//! one stream, and the GPU does what is on it in the order in which the host enqueued it. The lock gives that order: a rank
//! enqueues what makes its input, then deposits it; the last rank enqueues the work, then marks the operation as done; a
//! rank that sees this enqueues what uses its output, or overwrites its input. Several GPUs are ordered by events: a copy
//! waits for what is on the source's stream, and that stream for the copy. Inputs live until the work is enqueued, and a
//! stream frees memory in its order too. So a wait on the host says that the result may be used, not that it is there.
//! Reductions are made on the GPU of the lowest rank that gets the result, once, and copied to the others.

mod channel;
mod collective;
mod config;
mod copy;
#[cfg(feature = "cuda")]
mod cuda;
mod end;
mod host;
mod messages;
mod slot;
mod world;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use candle_core::{Device, Result, Tensor};

pub(crate) use config::ABORT_AFTER;
pub use config::LocalConfig;
pub(crate) use world::World;

use crate::{Communicator, Operation, Pending, Request};

/// One rank's end of a group of threads.
#[derive(Clone)]
pub(crate) struct LocalCommunicator {
    world: Arc<World>,
    /// Which of the world's groups: 0 is that of all ranks.
    group: i64,
    /// The world ranks of the group, by group rank.
    members: Arc<[usize]>,
    /// This rank in the group.
    rank: usize,
}

impl LocalCommunicator {
    /// The end of `rank` in the group of all ranks.
    pub(crate) fn new(world: Arc<World>, rank: usize) -> Self {
        Self {
            group: 0,
            members: (0..world.world_size()).collect(),
            rank,
            world,
        }
    }

    fn world_rank(&self) -> usize {
        self.members[self.rank]
    }
}

impl Communicator for LocalCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.members.len()
    }

    fn device(&self) -> &Device {
        self.world.device(self.world_rank())
    }

    fn start(&self, request: &mut Request<'_>) -> Result<Pending<Vec<Tensor>>> {
        self.world.delay(self.world_rank());
        match request.operation {
            Operation::Messages { messages, .. } => self.start_messages(request, messages),
            _ => self.start_collective(request),
        }
    }

    fn subgroup_number(&self) -> i64 {
        // Which no other group has.
        self.world.num_groups.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn subgroup(&self, ranks: &[usize], numbers: &[i64]) -> Result<Box<dyn Communicator>> {
        let members: Arc<[usize]> = ranks.iter().map(|rank| self.members[*rank]).collect();
        let rank = ranks.iter().position(|rank| *rank == self.rank);
        Ok(Box::new(Self {
            world: self.world.clone(),
            // The first rank's number is that of the group.
            group: numbers[0],
            members,
            rank: rank.unwrap_or(0),
        }))
    }
}
