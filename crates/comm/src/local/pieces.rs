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

use candle_core::{Device, Result, Shape, Storage, Tensor};
use rayon::prelude::*;

use super::call::Operation;
use super::element::{Element, reduce, with_element};
use crate::ReduceOp;

/// Bytes of one destination that one task fills: enough to hide the cost of a task, little enough to share out.
const TASK_BYTES: usize = 512 << 10;

/// Reduces ranges of the inputs into ranges of the outputs.
struct Piece<'a, T> {
    /// (input, first element)
    sources: Vec<(usize, usize)>,
    destinations: Vec<&'a mut [T]>,
}

/// The outputs of a collective, one per rank, each with a storage of its own. With `parallel` on all cores.
pub(super) fn run(operation: &Operation, inputs: &[Tensor], parallel: bool) -> Result<Vec<Tensor>> {
    let Some(first) = inputs.first() else {
        return Ok(Vec::new());
    };
    with_element!(
        first.dtype(),
        run_typed(operation, inputs, first.shape(), parallel)
    )
}

/// A copy of `xs` with a storage of its own, of the size of `xs` even if `xs` is a view of something larger.
pub(super) fn copy(xs: &Tensor) -> Result<Tensor> {
    let mut copies = run(
        &Operation::Broadcast { root: 0 },
        std::slice::from_ref(xs),
        false,
    )?;
    copies
        .pop()
        .ok_or_else(|| candle_core::Error::msg("a copy of one tensor gave none"))
}

fn run_typed<T: Element>(
    operation: &Operation,
    inputs: &[Tensor],
    shape: &Shape,
    parallel: bool,
) -> Result<Vec<Tensor>> {
    let world_size = inputs.len();
    let mut dims = shape.dims().to_vec();
    match (operation, dims.first_mut()) {
        (Operation::AllGather, Some(dim)) => *dim *= world_size,
        (Operation::ReduceScatter(_), Some(dim)) => *dim /= world_size,
        _ => {}
    }
    let len = dims.iter().product();
    let mut outputs: Vec<Vec<T>> = (0..world_size).map(|_| T::zeros(len)).collect();
    if len > 0 {
        let op = match operation {
            Operation::AllReduce(op) | Operation::ReduceScatter(op) => *op,
            _ => ReduceOp::Sum,
        };
        let pieces = cut(pieces(operation, &mut outputs, len));
        if parallel {
            pieces
                .into_par_iter()
                .try_for_each(|piece| fill(op, piece, inputs))?;
        } else {
            pieces
                .into_iter()
                .try_for_each(|piece| fill(op, piece, inputs))?;
        }
    }
    outputs
        .into_iter()
        .map(|output| Tensor::from_vec(output, dims.as_slice(), &Device::Cpu))
        .collect()
}

/// The pieces of a collective whose outputs have `len` elements each; see the table above.
fn pieces<'a, T>(
    operation: &Operation,
    outputs: &'a mut [Vec<T>],
    len: usize,
) -> Vec<Piece<'a, T>> {
    let world_size = outputs.len();
    let all_inputs = |offset: usize| {
        (0..world_size)
            .map(|input| (input, offset))
            .collect::<Vec<_>>()
    };
    let part = len / world_size;
    match operation {
        Operation::AllGather => {
            let mut pieces: Vec<Piece<'a, T>> = (0..world_size)
                .map(|input| Piece {
                    sources: vec![(input, 0)],
                    destinations: Vec::new(),
                })
                .collect();
            for output in outputs {
                for (piece, destination) in pieces.iter_mut().zip(output.chunks_mut(part)) {
                    piece.destinations.push(destination);
                }
            }
            pieces
        }
        Operation::ReduceScatter(_) => {
            let piece = |(rank, output): (usize, &'a mut Vec<T>)| Piece {
                sources: all_inputs(rank * len),
                destinations: vec![output],
            };
            outputs.iter_mut().enumerate().map(piece).collect()
        }
        Operation::AllToAll => {
            let mut pieces = Vec::new();
            for (rank, output) in outputs.iter_mut().enumerate() {
                for (input, destination) in output.chunks_mut(part).enumerate() {
                    pieces.push(Piece {
                        sources: vec![(input, rank * part)],
                        destinations: vec![destination],
                    });
                }
            }
            pieces
        }
        Operation::Broadcast { root } => vec![whole(vec![(*root, 0)], outputs)],
        _ => vec![whole(all_inputs(0), outputs)],
    }
}

fn whole<T>(sources: Vec<(usize, usize)>, outputs: &mut [Vec<T>]) -> Piece<'_, T> {
    Piece {
        sources,
        destinations: outputs.iter_mut().map(Vec::as_mut_slice).collect(),
    }
}

/// The same work in pieces of at most `TASK_BYTES`.
fn cut<T>(pieces: Vec<Piece<'_, T>>) -> Vec<Piece<'_, T>> {
    let task = (TASK_BYTES / size_of::<T>()).max(1);
    let mut tasks = Vec::new();
    for Piece {
        sources,
        destinations,
    } in pieces
    {
        let first = tasks.len();
        for destination in destinations {
            for (i, destination) in destination.chunks_mut(task).enumerate() {
                if tasks.len() == first + i {
                    let sources = sources
                        .iter()
                        .map(|(input, offset)| (*input, offset + i * task))
                        .collect();
                    tasks.push(Piece {
                        sources,
                        destinations: Vec::new(),
                    });
                }
                tasks[first + i].destinations.push(destination);
            }
        }
    }
    tasks
}

/// Does the work of one piece. Inputs are locked here and not around the parallel loop: a thread that helps out with
/// other work while it holds a lock could wait for itself.
fn fill<T: Element>(op: ReduceOp, piece: Piece<'_, T>, inputs: &[Tensor]) -> Result<()> {
    let Piece {
        sources,
        mut destinations,
    } = piece;
    let len = destinations
        .first()
        .map_or(0, |destination| destination.len());
    let storages: Vec<_> = sources
        .iter()
        .map(|(input, _)| inputs[*input].storage_and_layout())
        .collect();
    let slices = storages
        .iter()
        .zip(&sources)
        .map(|((storage, layout), (_, offset))| {
            let Storage::Cpu(storage) = &**storage else {
                candle_core::bail!("an input of the local backend is not on the CPU");
            };
            let start = layout.start_offset() + offset;
            let Some(slice) = storage.as_slice::<T>()?.get(start..start + len) else {
                candle_core::bail!("an input of the local backend is shorter than its shape");
            };
            Ok(slice)
        })
        .collect::<Result<Vec<_>>>()?;
    reduce(op, &slices, &mut destinations);
    Ok(())
}
