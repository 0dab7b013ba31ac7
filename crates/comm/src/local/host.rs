//! The work of collectives in host memory.

use candle_core::{Device, Result, Tensor};
use rayon::prelude::*;

use super::slot::{Deposit, Outputs};
use crate::ReduceOp;
use crate::memory::adopted::GivenAway;
use crate::reduction::element::{Element, read_all, write};
use crate::reduction::pairwise;
use crate::reduction::plan::{Piece, Plan};

/// Bytes of one destination that one task fills: enough to hide the cost of a task, little enough to share out.
const TASK_BYTES: usize = 512 << 10;

/// A piece with its outputs at hand.
struct Task<'a, T> {
    piece: Piece,
    destinations: Vec<&'a mut [T]>,
    /// Given tensors, and the first element in each.
    places: Vec<(&'a Tensor, usize)>,
}

/// The outputs of a collective: in a rank's place, which shares memory with the rank's own input at most, or with a storage of
/// its own. With `parallel` on all cores.
pub(super) fn run<T: Element>(plan: Plan, deposits: &[Deposit], parallel: bool) -> Result<Outputs> {
    let Plan { op, pieces } = plan;
    let outputs = deposits.iter().enumerate();
    let outputs = outputs.map(|(rank, Deposit { place, call, .. })| match place {
        Some(_) => Vec::new(),
        None => T::zeros(call.output_dims(rank).iter().product()),
    });
    let mut outputs: Vec<Vec<T>> = outputs.collect();
    let longest = (TASK_BYTES / size_of::<T>()).max(1);
    let mut rests: Vec<&mut [T]> = outputs.iter_mut().map(Vec::as_mut_slice).collect();
    let mut tasks = Vec::new();
    for piece in pieces.into_iter().flat_map(|piece| piece.cut(longest)) {
        let mut task = Task {
            piece,
            destinations: Vec::new(),
            places: Vec::new(),
        };
        for rank in piece.destinations.ranks(deposits.len()) {
            match &deposits[rank].place {
                // A rank's own part of what it gathers is in its place.
                Some(_) if piece.sources.only == Some(rank) => {}
                Some(place) => task.places.push((place, piece.destinations.first)),
                None => {
                    // Each output's pieces come in the order of their places, so each is at the front of what is left.
                    let (taken, rest) = std::mem::take(&mut rests[rank]).split_at_mut(piece.len);
                    rests[rank] = rest;
                    task.destinations.push(taken);
                }
            }
        }
        tasks.push(task);
    }
    let fill = |task| fill(op, task, deposits);
    match parallel {
        true => tasks.into_par_iter().try_for_each(fill)?,
        false => tasks.into_iter().try_for_each(fill)?,
    }
    let outputs = outputs.into_iter().zip(deposits).enumerate();
    outputs
        .map(|(rank, (output, deposit))| match deposit.place {
            Some(_) => Ok(None),
            None => {
                let dims = deposit.call.output_dims(rank);
                let output = Tensor::from_vec(output, dims, &Device::Cpu)?;
                Ok(Some(GivenAway::new(output)))
            }
        })
        .collect()
}

/// Does the work of one piece. Storages are locked here and not around the parallel loop: a thread that helps out with
/// other work while it holds a lock could wait for itself.
fn fill<T: Element>(op: ReduceOp, task: Task<'_, T>, deposits: &[Deposit]) -> Result<()> {
    let Task {
        piece: Piece { sources, len, .. },
        mut destinations,
        places,
    } = task;
    // A piece is small enough to stay in the cache until it is in the places of all ranks.
    let mut result = match (destinations.is_empty(), places.is_empty()) {
        (true, true) => return Ok(()),
        (true, false) => T::zeros(len),
        (false, _) => Vec::new(),
    };
    if destinations.is_empty() {
        destinations.push(&mut result);
    }
    let inputs = deposits[sources.ranks(deposits.len())].iter();
    let inputs = inputs.map(|deposit| &deposit.input);
    read_all(inputs, Some((sources.first, len)), |inputs| {
        let terms = pairwise::of_all(inputs.iter().copied());
        pairwise::reduce(op, &terms, &mut destinations);
    })?;
    let mut places = places.into_iter();
    places.try_for_each(|(place, first)| write(place, first, &*destinations[0]))
}
