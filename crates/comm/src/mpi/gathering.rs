//! One leg of a collective at its owner: the contributions of all sources, reduced in rank order.

use std::ffi::c_int;

use candle_core::Tensor;

use super::claim::Claim;
use super::context::Context;
use super::place::{Buffers, Place};
use super::route::Leg;
use super::sys::Comm;
use super::transfer::Transfer;
use crate::local::element::{Element, reduce};
use crate::{Error, ReduceOp};

type Result<T> = std::result::Result<T, Error>;

/// A leg at its owner.
pub(super) struct Gathering<T> {
    leg: Leg,
    rank: usize,
    /// Where the result goes, unless it is being received there.
    place: Option<Place<T>>,
    /// By source; none for this rank's own.
    contributions: Vec<Option<Transfer<Vec<T>>>>,
    /// The only contribution, received into its place.
    only: Option<Transfer<Place<T>>>,
}

impl<T: Element> Gathering<T> {
    /// Starts to receive the contributions of the other ranks to `leg`, whose result goes to `place`.
    pub fn begin(
        (ctx, comm, tag): (&Context, Comm, c_int),
        (leg, place): (Leg, Place<T>),
        rank: usize,
        buffers: &mut Buffers<T>,
    ) -> Result<Self> {
        let (mut contributions, mut only, mut place) = (Vec::new(), None, Some(place));
        let is_only = leg.sources.len() == 1;
        for &(from, _) in &leg.sources {
            if from == rank {
                contributions.push(None);
            } else if !is_only {
                let room = buffers.take(leg.len);
                let transfer = Transfer::receive(&ctx.mpi, comm, from, tag, room)?;
                contributions.push(Some(transfer));
            } else if let Some(place) = place.take() {
                only = Some(Transfer::receive(&ctx.mpi, comm, from, tag, place)?);
            }
        }
        Ok(Self {
            leg,
            rank,
            place,
            contributions,
            only,
        })
    }

    /// Whether all contributions are here.
    pub fn poll(&mut self, ctx: &Context, claim: &Claim<Tensor>) -> Result<bool> {
        if let Some(only) = &mut self.only {
            if !only.poll(&ctx.mpi)? {
                return Ok(false);
            }
            if let Some((place, got)) = self.only.take().and_then(Transfer::take) {
                claim.check_size(self.leg.sources[0].0, got, size_of_val(&*place))?;
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

    /// The leg's result, and the other ranks that want it.
    pub fn finish(
        self,
        op: ReduceOp,
        claim: &Claim<Tensor>,
        buffers: &mut Buffers<T>,
    ) -> Result<(Place<T>, Vec<usize>)> {
        let Self { leg, rank, .. } = self;
        let Some(mut place) = self.place else {
            return Err(Error::Backend(format!(
                "{}: a contribution is missing",
                claim.call
            )));
        };
        let mut received = Vec::new();
        for (transfer, (from, _)) in self.contributions.into_iter().zip(&leg.sources) {
            let vec = match transfer.and_then(Transfer::take) {
                Some((vec, got)) => {
                    claim.check_size(*from, got, size_of_val(&*vec))?;
                    vec
                }
                None => Vec::new(),
            };
            received.push(vec);
        }
        let own = leg.sources.iter().position(|(from, _)| *from == rank);
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
            Some(index) => claim.read(leg.sources[index].1, leg.len, |input: &[T]| {
                combine(Some(input));
            })?,
            None => combine(None),
        }
        (received.into_iter()).for_each(|buffer| buffers.give_back(buffer));
        let only = (leg.sources.len() == 1).then(|| leg.sources[0].0);
        let others = leg.destinations.iter().map(|(to, _)| *to);
        let others = others.filter(|to| *to != rank && Some(*to) != only);
        Ok((place, others.collect()))
    }
}
