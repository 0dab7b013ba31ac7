//! The `local` backend: the ranks are threads of one process, on the CPU.
//!
//! Starting an operation deposits the input and returns. The last rank to arrive does the work for everybody: small
//! operations on the spot, large ones in a background job, so that they progress while the ranks compute. One pass reads
//! the inputs in rank order and writes one output per rank.
//!
//! All waiting is on condition variables over one lock that guards the bookkeeping of the whole world; data is never
//! touched under it, except when an input is given up before the other ranks have arrived.

mod call;
mod channel;
mod collective;
mod config;
mod element;
mod pieces;
mod point_to_point;
mod report;
mod slot;
mod world;

use std::sync::Arc;

use candle_core::{Device, Result, Tensor};

pub use config::LocalConfig;
pub(crate) use world::{World, num_cores};

use crate::{Communicator, P2p, Pending, ReduceOp};
use call::Operation;
use slot::{Output, Payload};

/// One rank's end of a group of threads.
pub(crate) struct LocalCommunicator {
    world: Arc<World>,
    /// Which of the world's groups.
    group: usize,
    /// The world ranks of the group, by group rank.
    members: Arc<[usize]>,
    /// This rank in the group.
    rank: usize,
    device: Device,
}

impl LocalCommunicator {
    /// The end of `rank` in the group of all ranks.
    pub(crate) fn new(world: Arc<World>, rank: usize) -> Self {
        let members = world.members(0);
        Self {
            world,
            group: 0,
            members,
            rank,
            device: Device::Cpu,
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
        &self.device
    }

    #[track_caller]
    fn all_reduce(&self, xs: &Tensor, op: ReduceOp) -> Result<Pending<Tensor>> {
        self.start_on_tensor(Operation::AllReduce(op), xs)
    }

    #[track_caller]
    fn all_gather(&self, xs: &Tensor) -> Result<Pending<Tensor>> {
        self.start_on_tensor(Operation::AllGather, xs)
    }

    #[track_caller]
    fn reduce_scatter(&self, xs: &Tensor, op: ReduceOp) -> Result<Pending<Tensor>> {
        self.start_on_tensor(Operation::ReduceScatter(op), xs)
    }

    #[track_caller]
    fn broadcast(&self, xs: &Tensor, root: usize) -> Result<Pending<Tensor>> {
        self.start_on_tensor(Operation::Broadcast { root }, xs)
    }

    #[track_caller]
    fn all_to_all(&self, xs: &Tensor) -> Result<Pending<Tensor>> {
        self.start_on_tensor(Operation::AllToAll, xs)
    }

    #[track_caller]
    fn batch_send_recv(&self, ops: &[P2p<'_>]) -> Result<Pending<Vec<Tensor>>> {
        self.start_batch(ops)
    }

    #[track_caller]
    fn barrier(&self) -> Result<Pending<()>> {
        let ticket = self.start(Operation::Barrier, None, Payload::Nothing)?;
        Ok(Pending::from_work(Box::new(ticket)))
    }

    #[track_caller]
    fn split(&self, color: usize, key: usize) -> Result<Box<dyn Communicator>> {
        let output = self
            .start(Operation::Split, None, Payload::Split { color, key })?
            .wait_for_output()?;
        let Output::Group {
            group,
            rank,
            members,
        } = output
        else {
            candle_core::bail!("split gave {output:?} instead of a group");
        };
        let world = self.world.clone();
        Ok(Box::new(Self {
            world,
            group,
            members,
            rank,
            device: self.device.clone(),
        }))
    }
}
