//! The work of collectives on GPUs: copies between devices, and reductions made of candle's kernels.
//!
//! Nothing here waits for a GPU. What a rank enqueued before it started an operation runs before the operation, and what it
//! enqueues after the wait runs after it: ranks on one GPU share its stream, and a copy between two streams makes each of
//! them wait for the other (see [`copy`]).

use candle_core::{DType, Device, Result, Tensor};

use super::LocalCommunicator;
use super::copy::{CopyOf, copy};
use super::slot::{Deposit, Outputs};
use crate::ReduceOp;
use crate::memory::adopted::GivenAway;
use crate::memory::device::{empty, unwritten};
use crate::reduction::element::divide;
use crate::reduction::plan::{Piece, Plan};

/// Elements reduced at a time. candle's kernels count in 32 bits; and sums of this size (16 MiB) stay in the second-level
/// cache of a large GPU while the inputs are added two by two.
const LONGEST: usize = 4 << 20;

/// Enqueues the outputs of a collective, one per rank, in its place or with a storage of its own on the rank's device.
pub(super) fn run(plan: Plan, deposits: &[Deposit], group: &LocalCommunicator) -> Result<Outputs> {
    let devices = group.members.iter().map(|rank| group.world.device(*rank));
    let devices: Vec<&Device> = devices.collect();
    let dtype = deposits[0].input.dtype();
    let longest = match plan.pieces.iter().any(|piece| piece.sources.only.is_none()) {
        true => LONGEST,
        false => usize::MAX,
    };
    let Plan { op, pieces } = plan;
    let dims = (0..deposits.len()).map(|rank| deposits[rank].call.output_dims(rank));
    let dims: Vec<Vec<usize>> = dims.collect();
    let inputs = deposits.iter().map(|deposit| deposit.input.flatten_all());
    let inputs = inputs.collect::<Result<Vec<_>>>()?;
    let outputs = devices.iter().zip(&dims).map(|(device, dims)| Output {
        device,
        len: dims.iter().product(),
        xs: None,
    });
    let mut outputs: Vec<Output> = outputs.collect();
    for piece in pieces.into_iter().flat_map(|piece| piece.cut(longest)) {
        fill(op, piece, &inputs, &mut outputs)?;
    }
    let outputs = outputs.into_iter().zip(dims).zip(deposits);
    outputs
        .map(|((Output { device, xs, .. }, dims), deposit)| {
            let output = match (xs, &deposit.place) {
                (Some(output), Some(place)) => {
                    place.inplace_op1(&CopyOf(&output))?;
                    return Ok(None);
                }
                (Some(output), None) => output.reshape(dims)?,
                (None, _) => empty(dims, dtype, device)?,
            };
            Ok(Some(GivenAway::new(output)))
        })
        .collect()
}

/// What a rank gets, flat: nothing before its first piece.
struct Output<'a> {
    device: &'a Device,
    len: usize,
    xs: Option<Tensor>,
}

/// Enqueues the work of one piece, on the device of its first destination, and its result's way to all of them.
fn fill(op: ReduceOp, piece: Piece, inputs: &[Tensor], outputs: &mut [Output]) -> Result<()> {
    let sources = inputs[piece.sources.ranks(inputs.len())].iter();
    let sources = sources
        .map(|input| input.narrow(0, piece.sources.first, piece.len))
        .collect::<Result<Vec<_>>>()?;
    let mut destinations = piece.destinations.ranks(inputs.len());
    let result = match &sources[..] {
        [source] => source.clone(),
        _ => {
            let first = &mut outputs[destinations.start];
            let result = reduce(op, &sources, first.device)?;
            if piece.len == first.len {
                // It is new and a whole output, and nobody else's.
                first.xs = Some(result.clone());
                destinations.start += 1;
            }
            result
        }
    };
    for Output { device, len, xs } in &mut outputs[destinations] {
        let all = match xs {
            Some(all) => all,
            none => none.insert(unwritten(*len, result.dtype(), device)?),
        };
        all.narrow(0, piece.destinations.first, piece.len)?
            .inplace_op1(&CopyOf(&result))?;
    }
    Ok(())
}

/// The reduction of one tensor for each rank, [pairwise](crate::reduction::pairwise), on `device`. Half precision is accumulated in f32 and
/// rounded once, as on the CPU, so that the result has the same bits.
fn reduce(op: ReduceOp, sources: &[Tensor], device: &Device) -> Result<Tensor> {
    let mut result = combine(op, sources, device)?;
    if op == ReduceOp::Avg {
        result = divide(&result, sources.len())?;
    }
    result.to_dtype(sources[0].dtype())
}

/// The reduction before it is rounded.
fn combine(op: ReduceOp, sources: &[Tensor], device: &Device) -> Result<Tensor> {
    if let [source] = sources {
        let here = match source.device().same_device(device) {
            true => source.clone(),
            false => copy(source, device)?,
        };
        return match here.dtype() {
            DType::BF16 | DType::F16 => here.to_dtype(DType::F32),
            _ => Ok(here),
        };
    }
    let (left, right) = sources.split_at(sources.len().next_power_of_two() / 2);
    let (left, right) = (combine(op, left, device)?, combine(op, right, device)?);
    match op {
        ReduceOp::Sum | ReduceOp::Avg => left.add(&right),
        ReduceOp::Prod => left.mul(&right),
        ReduceOp::Max => first_or_nan(&left.gt(&right)?, &left, &right),
        ReduceOp::Min => first_or_nan(&left.lt(&right)?, &left, &right),
    }
}

/// The first of two values where that is said, else the second, NaN if one is: `maximum` and `minimum` on a GPU drop a NaN, and a NaN on
/// one rank must be seen by all.
fn first_or_nan(is_first: &Tensor, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if !a.dtype().is_float() {
        return is_first.where_cond(a, b);
    }
    let a_unless_number = a.ne(a)?.where_cond(a, b)?;
    is_first.where_cond(a, &a_unless_number)
}
