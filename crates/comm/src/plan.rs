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

use crate::element::Element;
use crate::{Operation, ReduceOp, pairwise};

/// The same place in the tensors of one rank or of all.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Places {
    /// The rank; all of them if there is none.
    pub only: Option<usize>,
    /// The first element there.
    pub first: usize,
}

impl Places {
    fn everywhere(first: usize) -> Self {
        Self { only: None, first }
    }

    fn one(rank: usize, first: usize) -> Self {
        Self {
            only: Some(rank),
            first,
        }
    }

    /// Whether `rank` has one.
    pub fn has(&self, rank: usize) -> bool {
        self.only.is_none_or(|only| only == rank)
    }

    /// The ranks that have one, of `world_size`.
    pub fn ranks(&self, world_size: usize) -> std::ops::Range<usize> {
        match self.only {
            Some(rank) => rank..rank + 1,
            None => 0..world_size,
        }
    }
}

/// Reduces ranges of the inputs into ranges of the outputs, all of `len` elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece {
    pub sources: Places,
    pub destinations: Places,
    pub len: usize,
}

impl Piece {
    /// The same work in pieces of at most `longest` elements.
    pub fn cut(self, longest: usize) -> impl Iterator<Item = Self> {
        let after = |places: Places, start| Places {
            first: places.first + start,
            ..places
        };
        (0..self.len).step_by(longest).map(move |start| Self {
            sources: after(self.sources, start),
            destinations: after(self.destinations, start),
            len: longest.min(self.len - start),
        })
    }
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
    /// The plan for one input of this shape for each of `world_size` ranks; if `rank` is given, as far as that rank gives or gets
    /// something.
    pub fn new(
        operation: &Operation,
        shape: &Shape,
        world_size: usize,
        rank: Option<usize>,
    ) -> Self {
        let dims = operation.output_dims(shape, world_size);
        let op = operation.reduce_op().unwrap_or(ReduceOp::Sum);
        let pieces = match dims.iter().product() {
            0 => Vec::new(),
            len => pieces(operation, len, world_size, rank),
        };
        Self { dims, op, pieces }
    }

    /// The output of `rank`, made of the inputs of all ranks.
    pub fn output_of<T: Element>(&self, rank: usize, inputs: &[&[T]]) -> Vec<T> {
        let mut output = T::zeros(self.len());
        let pieces = self.pieces.iter();
        for piece in pieces.filter(|piece| piece.destinations.has(rank)) {
            let (from, to) = (piece.sources.first, piece.destinations.first);
            let sources = inputs[piece.sources.ranks(inputs.len())].iter();
            let sources = sources.map(|input| &input[from..from + piece.len]);
            let place = &mut output[to..to + piece.len];
            pairwise::reduce(self.op, &pairwise::of_all(sources), &mut [place]);
        }
        output
    }

    /// Elements of each output.
    pub fn len(&self) -> usize {
        self.dims.iter().product()
    }
}

/// The pieces of a collective whose outputs have `len` elements each; see the table above.
fn pieces(operation: &Operation, len: usize, world_size: usize, rank: Option<usize>) -> Vec<Piece> {
    let ranks = 0..world_size;
    let part = len / world_size;
    let piece = |sources, destinations, len| Piece {
        sources,
        destinations,
        len,
    };
    let (one, everywhere) = (Places::one, Places::everywhere);
    match operation {
        Operation::AllGather | Operation::Split => ranks
            .map(|rank| piece(one(rank, 0), everywhere(rank * part), part))
            .collect(),
        Operation::ReduceScatter(_) => ranks
            .map(|rank| piece(everywhere(rank * len), one(rank, 0), len))
            .collect(),
        Operation::AllToAll => ranks
            .clone()
            .flat_map(|src| {
                let to = match rank {
                    Some(rank) if rank != src => rank..rank + 1,
                    _ => ranks.clone(),
                };
                to.map(move |dst| piece(one(src, dst * part), one(dst, src * part), part))
            })
            .collect(),
        Operation::Broadcast { root } => vec![piece(one(*root, 0), everywhere(0), len)],
        _ => vec![piece(everywhere(0), everywhere(0), len)],
    }
}
