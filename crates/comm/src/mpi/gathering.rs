//! One chunk of a collective at its owner: the contributions of all sources, reduced in rank order.

use std::ffi::c_int;

use super::context::Context;
use super::in_flight::InFlight;
use super::place::{Buffers, Place};
use super::route::Chunk;
use super::sys::Comm;
use super::transfer::Transfer;
use crate::element::{Element, reduce};
use crate::{Error, ReduceOp};

type Result<T> = std::result::Result<T, Error>;

/// A chunk at its owner.
pub(super) struct Gathering<T> {
    chunk: Chunk,
    rank: usize,
    /// Where the result goes, unless it is being received there.
    place: Option<Place<T>>,
    /// By source; none for this rank's own.
    contributions: Vec<Option<Transfer<Vec<T>>>>,
    /// The only contribution, received into its place.
    only: Option<Transfer<Place<T>>>,
}

impl<T: Element> Gathering<T> {
    /// Starts to receive the contributions of the other ranks to `chunk`, whose result goes to `place`.
    pub fn begin(
        (ctx, comm, tag): (&Context, Comm, c_int),
        (chunk, place): (Chunk, Place<T>),
        rank: usize,
        buffers: &mut Buffers<T>,
    ) -> Result<Self> {
        let (mut contributions, mut only, mut place) = (Vec::new(), None, Some(place));
        let is_only = chunk.sources.len() == 1;
        for &(from, _) in &chunk.sources {
            if from == rank {
                contributions.push(None);
            } else if !is_only {
                let room = buffers.take(chunk.len);
                let transfer = Transfer::receive(&ctx.mpi, comm, from, tag, room)?;
                contributions.push(Some(transfer));
            } else if let Some(place) = place.take() {
                only = Some(Transfer::receive(&ctx.mpi, comm, from, tag, place)?);
            }
        }
        Ok(Self {
            chunk,
            rank,
            place,
            contributions,
            only,
        })
    }

    /// Whether all contributions are here.
    pub fn poll(&mut self, ctx: &Context, in_flight: &InFlight) -> Result<bool> {
        if let Some(only) = &mut self.only {
            if !only.poll(&ctx.mpi)? {
                return Ok(false);
            }
            if let Some((place, got)) = self.only.take().and_then(Transfer::take) {
                in_flight.check_size(self.chunk.sources[0].0, got, size_of_val(&*place))?;
                self.place = Some(place);
            }
        }
        for contribution in self.contributions.iter_mut().flatten() {
            if !contribution.poll(&ctx.mpi)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The chunk's result, and the other ranks that want it.
    pub fn finish(
        self,
        op: ReduceOp,
        in_flight: &InFlight,
        buffers: &mut Buffers<T>,
    ) -> Result<(Place<T>, Vec<usize>)> {
        let Self { chunk, rank, .. } = self;
        let Some(mut place) = self.place else {
            return Err(Error::Backend(format!(
                "{}: a contribution is missing",
                in_flight.call
            )));
        };
        let mut received = Vec::new();
        for (transfer, (from, _)) in self.contributions.into_iter().zip(&chunk.sources) {
            let vec = match transfer.and_then(Transfer::take) {
                Some((vec, got)) => {
                    in_flight.check_size(*from, got, size_of_val(&*vec))?;
                    vec
                }
                None => Vec::new(),
            };
            received.push(vec);
        }
        let own = chunk.sources.iter().position(|(from, _)| *from == rank);
        let mut combine = |own_input: Option<&[T]>| {
            let sources: Vec<&[T]> = received
                .iter()
                .enumerate()
                .map(|(index, vec)| match own_input {
                    Some(input) if own == Some(index) => input,
                    _ => &vec[..],
                })
                .collect();
            // Without sources here the only contribution is in its place already.
            if !sources.is_empty() {
                reduce(op, &sources, &mut [&mut place]);
            }
        };
        match own {
            Some(index) => in_flight.read(chunk.sources[index].1, chunk.len, |input: &[T]| {
                combine(Some(input));
            })?,
            None => combine(None),
        }
        (received.into_iter()).for_each(|buffer| buffers.give_back(buffer));
        let only = (chunk.sources.len() == 1).then(|| chunk.sources[0].0);
        let others = chunk.destinations.iter().map(|(to, _)| *to);
        let others = others.filter(|to| *to != rank && Some(*to) != only);
        Ok((place, others.collect()))
    }
}
