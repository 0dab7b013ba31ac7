//! The work of collectives in host memory.

use candle_core::{Device, Result, Storage, Tensor};
use rayon::prelude::*;

use crate::adopted::give_away;
use crate::element::{Element, with_element, write};
use crate::pairwise;
use crate::plan::{Piece, Plan};
use crate::{Operation, ReduceOp};

/// Bytes of one destination that one task fills: enough to hide the cost of a task, little enough to share out.
const TASK_BYTES: usize = 512 << 10;

/// A piece with its outputs at hand.
struct Task<'a, T> {
    piece: Piece,
    destinations: Vec<&'a mut [T]>,
    /// Given tensors, and the first element in each.
    places: Vec<(&'a Tensor, usize)>,
}

/// The outputs of a collective, one per rank: in its place, which shares memory with the rank's own input at most, or with a
/// storage of its own. With `parallel` on all cores.
pub(crate) fn run(
    operation: &Operation,
    inputs: &[Tensor],
    places: &[Option<Tensor>],
    parallel: bool,
) -> Result<Vec<Tensor>> {
    let Some(first) = inputs.first() else {
        return Ok(Vec::new());
    };
    let plan = Plan::new(operation, first.shape(), inputs.len(), None);
    with_element!(first.dtype(), run_typed(plan, inputs, places, parallel))
}

fn run_typed<T: Element>(
    plan: Plan,
    inputs: &[Tensor],
    places: &[Option<Tensor>],
    parallel: bool,
) -> Result<Vec<Tensor>> {
    let len = plan.len();
    let new = |place: &Option<Tensor>| T::zeros(if place.is_some() { 0 } else { len });
    let mut outputs: Vec<Vec<T>> = places.iter().map(new).collect();
    let Plan { dims, op, pieces } = plan;
    let longest = (TASK_BYTES / size_of::<T>()).max(1);
    let mut rests: Vec<&mut [T]> = outputs.iter_mut().map(Vec::as_mut_slice).collect();
    let mut tasks = Vec::new();
    for piece in pieces.into_iter().flat_map(|piece| piece.cut(longest)) {
        let mut task = Task {
            piece,
            destinations: Vec::new(),
            places: Vec::new(),
        };
        for output in piece.destinations.ranks(inputs.len()) {
            match &places[output] {
                // A rank's own part of what it gathers is in its place.
                Some(_) if piece.sources.only == Some(output) => {}
                Some(place) => task.places.push((place, piece.destinations.first)),
                None => {
                    // Each output's pieces come in the order of their places, so each is at the front of what is left.
                    let (taken, rest) = std::mem::take(&mut rests[output]).split_at_mut(piece.len);
                    rests[output] = rest;
                    task.destinations.push(taken);
                }
            }
        }
        tasks.push(task);
    }
    if parallel {
        tasks
            .into_par_iter()
            .try_for_each(|task| fill(op, task, inputs))?;
    } else {
        tasks
            .into_iter()
            .try_for_each(|task| fill(op, task, inputs))?;
    }
    let outputs = outputs.into_iter().zip(places);
    outputs
        .map(|(output, place)| match place {
            Some(place) => Ok(place.clone()),
            None => {
                let output = Tensor::from_vec(output, dims.as_slice(), &Device::Cpu)?;
                give_away(len, output.dtype(), output.device());
                Ok(output)
            }
        })
        .collect()
}

/// Does the work of one piece. Storages are locked here and not around the parallel loop: a thread that helps out with
/// other work while it holds a lock could wait for itself.
fn fill<T: Element>(op: ReduceOp, task: Task<'_, T>, inputs: &[Tensor]) -> Result<()> {
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
    {
        let storages: Vec<_> = inputs[sources.ranks(inputs.len())]
            .iter()
            .map(Tensor::storage_and_layout)
            .collect();
        let slices = storages
            .iter()
            .map(|(storage, layout)| {
                let Storage::Cpu(storage) = &**storage else {
                    candle_core::bail!("an input is not in host memory as the other ranks' are");
                };
                let start = layout.start_offset() + sources.first;
                let Some(slice) = storage.as_slice::<T>()?.get(start..start + len) else {
                    candle_core::bail!("an input of the local backend is shorter than its shape");
                };
                Ok(slice)
            })
            .collect::<Result<Vec<_>>>()?;
        let terms = pairwise::of_all(slices.into_iter());
        pairwise::reduce(op, &terms, &mut destinations);
    }
    let Some(result) = destinations.first() else {
        return Ok(());
    };
    let mut places = places.into_iter();
    places.try_for_each(|(place, first)| write(place, first, result))
}
