//! Every collective as a list of pieces: ranges of inputs to reduce, and where the result goes.
//!
//! `i` and `j` are ranks, `[k]` is the k-th of `world_size` parts:
//!
//! | operation | pieces | sources | destinations |
//! |---|---|---|---|
//! | all_reduce | 1 | every input | every output |
//! | broadcast | 1 | the root's input | every output |
//! | all_gather | for each i | input i | `output[i]` of every rank |
//! | reduce_scatter | for each i | `input[i]` of every rank | output i |
//! | all_to_all | for each i, j | `input[j]` of rank i | `output[i]` of rank j |

use candle_core::Shape;

use crate::{Operation, ReduceOp};

/// Reduces ranges of the inputs into ranges of the outputs, all of `len` elements.
pub(crate) struct Piece {
    /// (input, first element)
    pub sources: Vec<(usize, usize)>,
    /// (output, first element)
    pub destinations: Vec<(usize, usize)>,
    pub len: usize,
}

/// What gives the outputs of a collective.
pub(crate) struct Plan {
    /// The shape of each output.
    pub dims: Vec<usize>,
    /// How sources are combined where there are several.
    pub op: ReduceOp,
    /// They fill every output from its first element to its last, in this order, without gaps.
    pub pieces: Vec<Piece>,
}

impl Plan {
    /// The plan for one input of this shape for each of `world_size` ranks.
    pub fn new(operation: &Operation, shape: &Shape, world_size: usize) -> Self {
        let dims = operation.output_dims(shape, world_size);
        let op = operation.reduce_op().unwrap_or(ReduceOp::Sum);
        let pieces = match dims.iter().product() {
            0 => Vec::new(),
            len => pieces(operation, len, world_size),
        };
        Self { dims, op, pieces }
    }

    /// Elements of each output.
    pub fn len(&self) -> usize {
        self.dims.iter().product()
    }

    /// The same work in pieces of at most `longest` elements.
    pub fn cut(mut self, longest: usize) -> Self {
        let moved = |places: &[(usize, usize)], start| {
            let places = places.iter();
            places
                .map(|(tensor, first)| (*tensor, first + start))
                .collect()
        };
        let parts = |piece: Piece| {
            (0..piece.len).step_by(longest).map(move |start| Piece {
                sources: moved(&piece.sources, start),
                destinations: moved(&piece.destinations, start),
                len: longest.min(piece.len - start),
            })
        };
        self.pieces = self.pieces.into_iter().flat_map(parts).collect();
        self
    }
}

/// The pieces of a collective whose outputs have `len` elements each; see the table above.
fn pieces(operation: &Operation, len: usize, world_size: usize) -> Vec<Piece> {
    let ranks = 0..world_size;
    let everywhere = |first: usize| ranks.clone().map(|rank| (rank, first)).collect();
    let part = len / world_size;
    match operation {
        Operation::AllGather | Operation::Split => ranks
            .clone()
            .map(|rank| Piece {
                sources: vec![(rank, 0)],
                destinations: everywhere(rank * part),
                len: part,
            })
            .collect(),
        Operation::ReduceScatter(_) => ranks
            .clone()
            .map(|rank| Piece {
                sources: everywhere(rank * len),
                destinations: vec![(rank, 0)],
                len,
            })
            .collect(),
        Operation::AllToAll => ranks
            .clone()
            .flat_map(|src| ranks.clone().map(move |dst| (src, dst)))
            .map(|(src, dst)| Piece {
                sources: vec![(src, dst * part)],
                destinations: vec![(dst, src * part)],
                len: part,
            })
            .collect(),
        Operation::Broadcast { root } => vec![Piece {
            sources: vec![(*root, 0)],
            destinations: everywhere(0),
            len,
        }],
        _ => vec![Piece {
            sources: everywhere(0),
            destinations: everywhere(0),
            len,
        }],
    }
}
