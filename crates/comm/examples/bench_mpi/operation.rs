//! What is measured: our side of it.

use candle_comm::{P2p, ProcessGroup, ReduceOp};
use candle_core::{Result, Tensor};

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    AllReduce,
    AllReduceInPlace,
    AllGather,
    ReduceScatter,
    Broadcast,
    AllToAll,
    PingPong,
}

impl Operation {
    pub fn of_name(name: &str) -> Option<Self> {
        [
            Self::AllReduce,
            Self::AllReduceInPlace,
            Self::AllGather,
            Self::ReduceScatter,
            Self::Broadcast,
            Self::AllToAll,
            Self::PingPong,
        ]
        .into_iter()
        .find(|operation| operation.name() == name)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllReduceInPlace => "all_reduce_in_place",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::Broadcast => "broadcast",
            Self::AllToAll => "all_to_all",
            Self::PingPong => "ping_pong",
        }
    }

    /// How many of as many parts as there are ranks the input and the output of a rank have.
    pub fn parts(self, num_ranks: usize) -> (usize, usize) {
        match self {
            Self::AllGather => (1, num_ranks),
            Self::ReduceScatter => (num_ranks, 1),
            _ => (num_ranks, num_ranks),
        }
    }

    /// How many times one way a call of it is.
    pub fn ways(self) -> f64 {
        match self {
            Self::PingPong => 2.,
            _ => 1.,
        }
    }

    /// Runs it; the result, if it is one to compare with MPI's.
    pub fn run(self, world: &ProcessGroup, xs: &Tensor) -> Result<Option<Tensor>> {
        Ok(match self {
            Self::AllReduce => Some(world.all_reduce(xs, ReduceOp::Sum)?),
            Self::AllReduceInPlace => {
                Some((world.start_all_reduce_in_place(xs, ReduceOp::Sum)?).wait()?)
            }
            Self::AllGather => Some(world.all_gather(xs, 0)?),
            Self::ReduceScatter => Some(world.reduce_scatter(xs, ReduceOp::Sum, 0)?),
            Self::Broadcast => Some(world.broadcast(xs, 0)?),
            Self::AllToAll => Some(world.all_to_all(xs, 0)?),
            Self::PingPong => {
                ping_pong(world, xs)?;
                None
            }
        })
    }
}

/// A message from the first rank to the last, and one back.
fn ping_pong(world: &ProcessGroup, xs: &Tensor) -> Result<()> {
    let last = world.world_size() - 1;
    let send = |dst| world.batch_send_recv(&[P2p::Send { xs, dst }]);
    let recv = |src| {
        let (shape, dtype) = (xs.shape().clone(), xs.dtype());
        world.batch_send_recv(&[P2p::Recv { shape, dtype, src }])
    };
    if world.rank() == 0 {
        send(last)?;
        recv(last)?;
    } else if world.rank() == last {
        recv(0)?;
        send(0)?;
    }
    Ok(())
}
