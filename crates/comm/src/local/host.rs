//! The work of collectives in host memory.

use candle_core::{Device, Result, Storage, Tensor};
use rayon::prelude::*;

use super::call::Operation;
use super::element::{Element, reduce, with_element};
use super::pieces::Plan;
use crate::ReduceOp;

/// Bytes of one destination that one task fills: enough to hide the cost of a task, little enough to share out.
const TASK_BYTES: usize = 512 << 10;

/// A piece with its outputs at hand.
struct Task<'a, T> {
    /// (input, first element)
    sources: Vec<(usize, usize)>,
    destinations: Vec<&'a mut [T]>,
}

/// The outputs of a collective, one per rank, each with a storage of its own. With `parallel` on all cores.
pub(crate) fn run(operation: &Operation, inputs: &[Tensor], parallel: bool) -> Result<Vec<Tensor>> {
    let Some(first) = inputs.first() else {
        return Ok(Vec::new());
    };
    let plan = Plan::new(operation, first.shape(), inputs.len());
    with_element!(first.dtype(), run_typed(plan, inputs, parallel))
}

/// A copy of `xs` with a storage of its own, of the size of `xs` even if `xs` is a view of something larger.
pub(crate) fn copy(xs: &Tensor) -> Result<Tensor> {
    let broadcast = Operation::Broadcast { root: 0 };
    let mut copies = run(&broadcast, std::slice::from_ref(xs), false)?;
    copies
        .pop()
        .ok_or_else(|| candle_core::Error::msg("a copy of one tensor gave none"))
}

fn run_typed<T: Element>(plan: Plan, inputs: &[Tensor], parallel: bool) -> Result<Vec<Tensor>> {
    let len = plan.len();
    let mut outputs: Vec<Vec<T>> = inputs.iter().map(|_| T::zeros(len)).collect();
    let Plan { dims, op, pieces } = plan.cut((TASK_BYTES / size_of::<T>()).max(1));
    let mut rests: Vec<&mut [T]> = outputs.iter_mut().map(Vec::as_mut_slice).collect();
    let mut tasks = Vec::with_capacity(pieces.len());
    for piece in pieces {
        // Each output's pieces come in the order of their places, so each is at the front of what is left.
        let mut take = |output: usize| {
            let (taken, rest) = std::mem::take(&mut rests[output]).split_at_mut(piece.len);
            rests[output] = rest;
            taken
        };
        tasks.push(Task {
            destinations: piece.destinations.iter().map(|(o, _)| take(*o)).collect(),
            sources: piece.sources,
        });
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
    outputs
        .into_iter()
        .map(|output| Tensor::from_vec(output, dims.as_slice(), &Device::Cpu))
        .collect()
}

/// Does the work of one piece. Inputs are locked here and not around the parallel loop: a thread that helps out with
/// other work while it holds a lock could wait for itself.
fn fill<T: Element>(op: ReduceOp, task: Task<'_, T>, inputs: &[Tensor]) -> Result<()> {
    let Task {
        sources,
        mut destinations,
    } = task;
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
                candle_core::bail!("an input is not in host memory as the other ranks' are");
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
