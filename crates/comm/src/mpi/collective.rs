//! A collective on its way: the ranks meet, then their data move.

use std::sync::Arc;

use candle_core::{DType, Shape, Tensor};

use super::Result;
use super::context::Context;
use super::group::MpiGroup;
use super::header::{Header, INLINE_BYTES};
use super::in_flight::MpiInFlight;
use super::meeting::Meeting;
use super::movement::Movement;
use super::route::Route;
use crate::Error;
use crate::memory::bytes;
use crate::reduction::element::{self, Element, with_element};
use crate::reduction::plan::Plan;

/// A collective. With few bytes each rank sends its whole input with its first message, and all compute their own output; else the
/// data move as the [`Route`] says.
pub(super) struct Collective {
    in_flight: Arc<MpiInFlight>,
    /// Of the input of each rank, or of all together.
    shape: Shape,
    dtype: DType,
    group: Arc<MpiGroup>,
    /// Its number in the group.
    pub seq: u64,
    meeting: Meeting,
    phase: Phase,
}

enum Phase {
    Meeting,
    Moving(Movement),
    /// The result is there.
    Done,
}

impl Collective {
    /// Sends this rank's first message; `seq` is the operation's number in its group.
    pub fn begin(
        ctx: &Context,
        (group, seq): (Arc<MpiGroup>, u64),
        in_flight: Arc<MpiInFlight>,
    ) -> Result<Self> {
        fn input<T: Element>(in_flight: &MpiInFlight, len: usize) -> Result<Vec<u8>> {
            in_flight.read(0, len, |xs: &[T]| bytes::of(xs).to_vec())
        }
        // It takes one tensor.
        let (dtype, shape) = in_flight.call.kinds[0].clone();
        let data = match is_small(&shape, dtype) {
            true => {
                let (operation, n) = (&in_flight.call.operation, group.members.len());
                let len = operation.input_len(&shape, n, group.rank);
                with_element!(dtype, input(&in_flight, len))
            }
            false => Ok(Vec::new()),
        };
        let header = Header {
            call: in_flight.call.what(),
            site: in_flight.call.site.to_string(),
            data: data?,
            follows: 0,
        };
        let meeting = Meeting::begin(ctx, group.clone(), seq, header)?;
        in_flight.set_missing(meeting.missing());
        Ok(Self {
            in_flight,
            shape,
            dtype,
            group,
            seq,
            meeting,
            phase: Phase::Meeting,
        })
    }

    /// Does what can be done now, and returns whether that was something; data move only if `may_move`.
    pub fn poll(&mut self, ctx: &Context, may_move: bool) -> Result<bool> {
        let met = !self.meeting.is_over() && self.meeting.poll(ctx)?;
        if met && !self.has_met() {
            match self.meeting.mismatch() {
                Some(error) => self.complete(Err(error)),
                None => self.in_flight.set_missing(self.meeting.missing()),
            }
        }
        match &mut self.phase {
            Phase::Meeting if may_move && self.meeting.is_complete() => self.begin_to_move()?,
            Phase::Moving(movement) => {
                let moved = movement.poll(ctx)?;
                if !movement.is_over() {
                    return Ok(met | moved);
                }
                let output = movement.take_output()?;
                self.complete(Ok(output));
            }
            Phase::Meeting | Phase::Done => return Ok(met),
        }
        Ok(true)
    }

    /// Goes on once all have met.
    fn begin_to_move(&mut self) -> Result<()> {
        let (in_flight, group) = (self.in_flight.clone(), self.group.clone());
        if is_small(&self.shape, self.dtype) {
            let data = self.meeting.take_data();
            let output = with_element!(
                self.dtype,
                output(&in_flight, &self.shape, group.rank, &data)
            );
            self.complete(Ok(output?));
            return Ok(());
        }
        let (dtype, bytes) = (self.dtype, self.dtype.size_in_bytes());
        let widening = element::accumulated(dtype).size_in_bytes() / bytes;
        let operation = &in_flight.call.operation;
        let route = Route::new(operation, &self.shape, group, (bytes, widening));
        self.phase = Phase::Moving(Movement::new(route, dtype, self.seq, in_flight)?);
        Ok(())
    }

    fn complete(&mut self, outcome: Result<Vec<Tensor>>) {
        self.phase = Phase::Done;
        self.in_flight.complete(outcome);
    }

    /// Whether all ranks were there, and it has begun to move data.
    pub fn has_met(&self) -> bool {
        !matches!(self.phase, Phase::Meeting)
    }

    /// Whether nothing is left to do.
    pub fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Done) && self.meeting.is_over()
    }

    /// The world ranks without which it cannot go on.
    pub fn missing(&self) -> Vec<usize> {
        self.meeting.missing()
    }

    /// Ends it with the error that `error` makes of its call.
    pub fn fail(&mut self, ctx: &Context, error: &dyn Fn(&str) -> Error) {
        self.complete(Err(error(&self.in_flight.call.to_string())));
        if let Err(error) = self.meeting.cancel(ctx) {
            tracing::warn!("receives could not be given up: {error}");
        }
    }
}

/// Whether the input goes with the first message.
fn is_small(shape: &Shape, dtype: DType) -> bool {
    shape.elem_count() * dtype.size_in_bytes() <= INLINE_BYTES
}

/// The output of rank `rank`, from all inputs.
fn output<T: Element>(
    in_flight: &MpiInFlight,
    shape: &Shape,
    rank: usize,
    data: &[Vec<u8>],
) -> Result<Vec<Tensor>> {
    let call = &in_flight.call;
    let inputs = data.iter().enumerate().map(|(source, bytes)| {
        let len = call.operation.input_len(shape, data.len(), source);
        bytes::to_elements(bytes, len).ok_or_else(|| {
            let (got, expected) = (bytes.len(), len * size_of::<T>());
            Error::Backend(format!(
                "{call}: rank {source} of the group sent {got} bytes, expected {expected}"
            ))
        })
    });
    let inputs = inputs.collect::<Result<Vec<Vec<T>>>>()?;
    let inputs: Vec<&[T]> = inputs.iter().map(Vec::as_slice).collect();
    let plan = Plan::new(&call.operation, shape, inputs.len(), Some(rank));
    in_flight.result(plan.output_of(rank, &inputs), &call.output_dims(rank))
}
