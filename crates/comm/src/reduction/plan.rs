//! Every collective as a list of pieces: ranges of inputs to reduce, and where the result goes.
//!
//! `i` and `j` are ranks, `[k]` is the k-th of `world_size` parts, which are equal but for scatter and gather:
//!
//! | operation | pieces | sources | destinations |
//! |---|---|---|---|
//! | all_reduce | 1 | every input | every output |
//! | broadcast | 1 | the root's input | every output |
//! | all_gather | for each i | input i | `output[i]` of every rank |
//! | reduce_scatter | for each i | `input[i]` of every rank | output i |
//! | all_to_all | for each i, j | `input[j]` of rank i | `output[i]` of rank j |
//! | reduce | 1 | every input | the root's output |
//! | scatter | for each j | `input[j]` of the root | output j |
//! | gather | for each i | input i | `output[i]` of the root |

use candle_core::Shape;

use crate::reduction::element::Element;
use crate::reduction::pairwise;
use crate::{Operation, ReduceOp};

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
    /// How sources are combined where there are several.
    pub op: ReduceOp,
    /// They have elements, and fill every output from its first to its last, in this order, without gaps.
    pub pieces: Vec<Piece>,
}

impl Plan {
    /// The plan for `world_size` ranks that agree on a tensor of this shape; if `rank` is given, as far as that rank gives or gets something.
    pub fn new(
        operation: &Operation,
        shape: &Shape,
        world_size: usize,
        rank: Option<usize>,
    ) -> Self {
        let op = operation.reduce_op().unwrap_or(ReduceOp::Sum);
        let mut pieces = match shape.elem_count() {
            0 => Vec::new(),
            len => pieces(operation, len, world_size, rank),
        };
        pieces.retain(|piece| piece.len > 0);
        Self { op, pieces }
    }

    /// The output of `rank`, made of the inputs of all ranks.
    pub fn output_of<T: Element>(&self, rank: usize, inputs: &[&[T]]) -> Vec<T> {
        let pieces = self
            .pieces
            .iter()
            .filter(|piece| piece.destinations.has(rank));
        let mut output = T::zeros(pieces.clone().map(|piece| piece.len).sum());
        for piece in pieces {
            let (from, to) = (piece.sources.first, piece.destinations.first);
            let sources = inputs[piece.sources.ranks(inputs.len())].iter();
            let sources = sources.map(|input| &input[from..from + piece.len]);
            let place = &mut output[to..to + piece.len];
            pairwise::reduce(self.op, &pairwise::of_all(sources), &mut [place]);
        }
        output
    }
}

/// The pieces of a collective of ranks that agree on a tensor of `len` elements; see the table above.
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
            .map(|rank| piece(one(rank, 0), everywhere(rank * len), len))
            .collect(),
        Operation::ReduceScatter(_) => ranks
            .map(|rank| piece(everywhere(rank * part), one(rank, 0), part))
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
        Operation::Reduce { root, .. } => vec![piece(everywhere(0), one(*root, 0), len)],
        Operation::Scatter { root, sizes } | Operation::Gather { root, sizes } => {
            let row = len / sizes.iter().sum::<usize>().max(1);
            let mut first = 0;
            let of_rank = |rank: usize| {
                let (of_root, own) = (one(*root, first), one(rank, 0));
                let len = sizes[rank] * row;
                first += len;
                match operation {
                    Operation::Scatter { .. } => piece(of_root, own, len),
                    _ => piece(own, of_root, len),
                }
            };
            ranks.map(of_rank).collect()
        }
        _ => vec![piece(everywhere(0), everywhere(0), len)],
    }
}
