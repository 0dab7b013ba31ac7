//! Which rank does what for a collective.
//!
//! The work is that of the local backend ([`Plan`]), cut into chunks. Each chunk has an owner: the ranks that have a source
//! send it to the owner, the owner reduces in rank order and sends the result to the other ranks that want it.
//!
//! | operation | owner of a chunk | bytes sent per rank, `N` ranks |
//! |---|---|---|
//! | all_reduce | the ranks in turns | `2 (N-1)/N *` size |
//! | all_gather | who has it | `(N-1)/N *` output size |
//! | reduce_scatter, all_to_all | who gets it | `(N-1)/N *` input size |
//! | broadcast | the ranks in turns | at most `2 (N-1)/N *` size |

use candle_core::Shape;

use crate::plan::{Piece, Plan};
use crate::{Operation, ReduceOp};

/// What one message holds at most: little enough to stay in a cache while it is copied and reduced.
const CHUNK_BYTES: usize = 512 << 10;

/// What the messages of one operation that wait to be reduced hold at most, on one rank.
const WINDOW_BYTES: usize = 32 << 20;

/// A piece of the work with the rank that does it.
pub(super) struct Chunk {
    pub owner: usize,
    /// (rank, first element of its input)
    pub sources: Vec<(usize, usize)>,
    /// (rank, first element of its output)
    pub destinations: Vec<(usize, usize)>,
    pub len: usize,
}

/// The chunks of a collective.
pub(super) struct Route {
    /// The shape of each output.
    pub dims: Vec<usize>,
    pub op: ReduceOp,
    /// Ranks of the group.
    pub world_size: usize,
    /// They fill every output from its first element to its last, in this order, without gaps.
    pub chunks: Vec<Chunk>,
}

impl Route {
    /// The route for one input of this shape, of elements of `element_bytes`, for each of `world_size` ranks.
    pub fn new(
        operation: &Operation,
        shape: &Shape,
        world_size: usize,
        element_bytes: usize,
    ) -> Self {
        let plan = Plan::new(operation, shape, world_size);
        let in_turns = matches!(
            operation,
            Operation::AllReduce(_) | Operation::Broadcast { .. }
        );
        let chunk_bytes = CHUNK_BYTES.min(WINDOW_BYTES / world_size.max(1)).max(4096);
        let mut longest = chunk_bytes / element_bytes.max(1);
        if in_turns {
            // Everybody gets a turn; whole cache lines.
            longest = longest.min(plan.len().div_ceil(world_size.max(1)).next_multiple_of(64));
        }
        let Plan { dims, op, pieces } = plan.cut(longest.max(1));
        let chunks = pieces.into_iter().enumerate().map(|(index, piece)| {
            let Piece {
                sources,
                destinations,
                len,
            } = piece;
            let owner = match (&sources[..], &destinations[..]) {
                _ if in_turns => index % world_size,
                (_, [(rank, _)]) | ([(rank, _)], _) => *rank,
                _ => index % world_size,
            };
            Chunk {
                owner,
                sources,
                destinations,
                len,
            }
        });
        Self {
            dims,
            op,
            world_size,
            chunks: chunks.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes that each rank sends.
    fn sent(route: &Route, world_size: usize, element_bytes: usize) -> Vec<usize> {
        let mut sent = vec![0; world_size];
        for chunk in &route.chunks {
            let single = (chunk.sources.len() == 1).then(|| chunk.sources[0].0);
            for (rank, _) in chunk
                .sources
                .iter()
                .filter(|(rank, _)| *rank != chunk.owner)
            {
                sent[*rank] += chunk.len * element_bytes;
            }
            let others = chunk.destinations.iter().map(|(rank, _)| *rank);
            let others = others.filter(|rank| *rank != chunk.owner && Some(*rank) != single);
            sent[chunk.owner] += others.count() * chunk.len * element_bytes;
        }
        sent
    }

    #[test]
    fn bytes_are_those_of_a_ring() {
        let shape = Shape::from((4096, 1024));
        let size = 4096 * 1024 * 4;
        let route = |operation| Route::new(&operation, &shape, 4, 4);
        let all_reduce = route(Operation::AllReduce(ReduceOp::Sum));
        assert_eq!(sent(&all_reduce, 4, 4), [2 * size / 4 * 3; 4]);
        let all_gather = route(Operation::AllGather);
        assert_eq!(sent(&all_gather, 4, 4), [size * 3; 4]);
        let reduce_scatter = route(Operation::ReduceScatter(ReduceOp::Max));
        assert_eq!(sent(&reduce_scatter, 4, 4), [size / 4 * 3; 4]);
        assert_eq!(sent(&route(Operation::AllToAll), 4, 4), [size / 4 * 3; 4]);
        let broadcast = sent(&route(Operation::Broadcast { root: 2 }), 4, 4);
        assert_eq!(broadcast[2], size / 4 * 3 * 2);
        assert_eq!(broadcast[0], size / 4 * 2);
    }

    #[test]
    fn legs_are_short_and_the_owner_wants_the_result() {
        for world_size in [1, 2, 3, 5, 300] {
            let shape = Shape::from((world_size * 7, 30_011));
            for operation in [
                Operation::AllReduce(ReduceOp::Sum),
                Operation::AllGather,
                Operation::ReduceScatter(ReduceOp::Sum),
                Operation::AllToAll,
                Operation::Broadcast { root: 0 },
            ] {
                let route = Route::new(&operation, &shape, world_size, 2);
                for chunk in &route.chunks {
                    assert!(chunk.len * 2 <= CHUNK_BYTES && chunk.len > 0);
                    assert!(
                        chunk
                            .destinations
                            .iter()
                            .any(|(rank, _)| *rank == chunk.owner)
                    );
                }
            }
        }
    }
}
