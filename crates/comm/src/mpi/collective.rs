//! A collective on its way: the ranks meet, then their data move.

use std::sync::Arc;

use candle_core::{Device, Shape, Tensor};

use super::context::Context;
use super::engine::{Activity, Progress};
use super::header::{Header, INLINE_BYTES};
use super::in_flight::InFlight;
use super::meeting::Meeting;
use super::movement::Movement;
use super::native::NativeSum;
use super::route::Route;
use crate::Error;
use crate::bytes;
use crate::call::Call;
use crate::element::Element;
use crate::pairwise;
use crate::plan::Plan;

type Result<T> = std::result::Result<T, Error>;

/// A collective on tensors of elements `T`. With few bytes each rank sends its whole input with its first message, and
/// all compute their own output; else the data move as the [`Route`] says.
pub(super) struct Collective<T: Element> {
    in_flight: Arc<InFlight>,
    call: Call,
    /// Of the input of each rank.
    shape: Shape,
    /// The group, and the operation's number there.
    place: (usize, u64),
    meeting: Option<Meeting>,
    phase: Phase<T>,
}

enum Phase<T: Element> {
    Meeting,
    /// MPI adds.
    Summing(NativeSum<T>),
    Moving(Box<Movement<T>>),
    /// The result is there.
    Done,
}

impl<T: Element> Collective<T> {
    pub fn new(in_flight: Arc<InFlight>, call: Call, shape: Shape) -> Self {
        Self {
            in_flight,
            call,
            shape,
            place: (0, 0),
            meeting: None,
            phase: Phase::Meeting,
        }
    }

    fn complete(&mut self, outcome: Result<Tensor>) {
        self.phase = Phase::Done;
        self.in_flight.complete(outcome.map(|output| vec![output]));
    }

    fn poll_meeting(&mut self, ctx: &Context) -> Result<bool> {
        let Some(meeting) = &mut self.meeting else {
            return Ok(false);
        };
        if meeting.is_over() {
            return Ok(false);
        }
        let moved = meeting.poll(ctx)?;
        if moved && matches!(self.phase, Phase::Meeting) {
            match meeting.mismatch(ctx) {
                Some(error) => self.complete(Err(error)),
                None => self.in_flight.set_missing(meeting.missing(ctx)),
            }
        }
        Ok(moved)
    }

    /// Goes on once all have met.
    fn work(&mut self, ctx: &Context, may_move: bool) -> Result<bool> {
        match (&mut self.phase, &mut self.meeting) {
            (Phase::Meeting, Some(meeting)) if may_move && meeting.is_complete() => {
                let data = meeting.take_data();
                let group = &ctx.groups[self.place.0];
                let rank = group.rank;
                if self.is_small() {
                    let output = self.reduce_here(rank, &data)?;
                    self.complete(Ok(output));
                } else if let Some(group) = ctx.groups[self.place.0].native
                    && NativeSum::<T>::is_for(&self.call.operation)
                {
                    let (what, group) = ((&self.call.operation, &self.shape), (group, data.len()));
                    let sum = NativeSum::begin(&ctx.mpi, group, what, &self.in_flight)?;
                    self.phase = Phase::Summing(sum);
                } else {
                    let (operation, hosts) = (&self.call.operation, group.hosts.clone());
                    let sizes = (size_of::<T>(), size_of::<T::Acc>() / size_of::<T>());
                    let route = Route::new(operation, &self.shape, hosts, rank, sizes);
                    let movement = Movement::new(route, self.place, rank, &self.in_flight)?;
                    self.phase = Phase::Moving(Box::new(movement));
                }
                Ok(true)
            }
            (Phase::Summing(sum), _) => {
                if !sum.poll(&ctx.mpi)? {
                    return Ok(false);
                }
                if let Phase::Summing(sum) = std::mem::replace(&mut self.phase, Phase::Done) {
                    let output = sum.into_output(&self.in_flight)?;
                    self.complete(Ok(output));
                }
                Ok(true)
            }
            (Phase::Moving(movement), _) => {
                let moved = movement.poll(ctx, &self.in_flight)?;
                if !movement.is_over() {
                    return Ok(moved);
                }
                if let Phase::Moving(movement) = std::mem::replace(&mut self.phase, Phase::Done) {
                    let output = movement.into_output(&self.in_flight)?;
                    self.complete(Ok(output));
                }
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    fn is_small(&self) -> bool {
        self.shape.elem_count() * size_of::<T>() <= INLINE_BYTES
    }

    /// This rank's output, from all inputs.
    fn reduce_here(&self, rank: usize, data: &[Vec<u8>]) -> Result<Tensor> {
        let Plan { dims, op, pieces } =
            Plan::new(&self.call.operation, &self.shape, data.len(), Some(rank));
        let mut output = T::zeros(dims.iter().product());
        let num_elements = self.shape.elem_count();
        let inputs: Result<Vec<Vec<T>>> = data
            .iter()
            .enumerate()
            .map(|(source, data)| {
                bytes::to_elements(data, num_elements).ok_or_else(|| {
                    let (call, got) = (&self.in_flight.call, data.len());
                    let expected = num_elements * size_of::<T>();
                    Error::Backend(format!(
                        "{call}: rank {source} of the group sent {got} bytes, expected {expected}"
                    ))
                })
            })
            .collect();
        let inputs = inputs?;
        for piece in pieces.iter().filter(|piece| piece.destinations.has(rank)) {
            let (from, to) = (piece.sources.first, piece.destinations.first);
            let sources = inputs[piece.sources.ranks(inputs.len())].iter();
            let sources = sources.map(|input| &input[from..from + piece.len]);
            let output = &mut output[to..to + piece.len];
            pairwise::reduce(op, &pairwise::of_all(sources), &mut [output]);
        }
        self.in_flight.write(0, &output)?;
        match self.in_flight.place() {
            Some(place) => Ok(place),
            None => Tensor::from_vec(output, dims, &Device::Cpu).map_err(Error::of_backend),
        }
    }
}

impl<T: Element> Activity for Collective<T> {
    fn begin(&mut self, ctx: &Context, group: usize, seq: u64) -> Result<()> {
        self.place = (group, seq);
        let data = match self.is_small() {
            true => (self.in_flight).read(0, self.shape.elem_count(), |xs: &[T]| {
                bytes::of(xs).to_vec()
            })?,
            false => Vec::new(),
        };
        let header = Header {
            call: self.call.what(),
            site: self.call.site.to_string(),
            data,
        };
        let meeting = Meeting::begin(ctx, group, seq, header)?;
        self.in_flight.set_missing(meeting.missing(ctx));
        self.meeting = Some(meeting);
        Ok(())
    }

    fn poll(&mut self, ctx: &Context, may_move: bool) -> Result<Progress> {
        let outcome = self
            .poll_meeting(ctx)
            .and_then(|met| Ok(met | self.work(ctx, may_move)?));
        let moved = match outcome {
            Ok(moved) => moved,
            Err(error) => {
                // Everybody else gets the error from the engine; this operation is not among its own any more.
                self.complete(Err(error.clone()));
                return Err(error);
            }
        };
        let has_met = self.meeting.as_ref().is_none_or(Meeting::is_over);
        Ok(match (&self.phase, moved) {
            (Phase::Done, _) if has_met => Progress::Over,
            (_, true) => Progress::Some,
            _ => Progress::None,
        })
    }

    fn has_met(&self) -> bool {
        !matches!(self.phase, Phase::Meeting)
    }

    fn missing(&self, ctx: &Context) -> Vec<usize> {
        let meeting = self.meeting.as_ref();
        meeting.map_or(Vec::new(), |meeting| meeting.missing(ctx))
    }

    fn fail(&mut self, ctx: &Context, error: &dyn Fn(&str) -> Error) {
        self.complete(Err(error(&self.in_flight.call)));
        if let Some(mut meeting) = self.meeting.take()
            && let Err(error) = meeting.cancel(ctx)
        {
            tracing::warn!("receives could not be given up: {error}");
        }
    }
}
