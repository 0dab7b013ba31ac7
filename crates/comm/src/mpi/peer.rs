//! What a rank of a collective has to do with one of the others: contributions to send, results to receive and to send.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::Arc;

use super::context::Context;
use super::gathering::Pools;
use super::in_flight::InFlight;
use super::place::{Place, Room};
use super::tags;
use super::transfer::{Lend, Transfer};
use crate::Error;
use crate::element::Element;

type Result<T> = std::result::Result<T, Error>;

/// Chunks under way at once: contributions to one rank, and those that are gathered here.
pub(super) const NUM_GATHERED: usize = 3;

/// Results under way at once, from or to one rank.
pub(super) const NUM_RESULTS: usize = 6;

/// The messages of one other rank with one tag.
pub(super) type Lane = (usize, c_int);

/// What a rank has to do with one of the other ranks. What results it makes and what results it passes on are apart.
pub(super) struct Peer<T: Element> {
    /// (first element of the input, number of elements) of the contributions that are yet to be sent.
    pub contributions: VecDeque<(usize, usize)>,
    pub contributions_out: VecDeque<Transfer<Vec<T>>>,
    pub blocks_out: VecDeque<Transfer<Vec<T::Acc>>>,
    /// Where results go that are not being received yet.
    pub expected: VecDeque<Room<T>>,
    pub results_in: VecDeque<Transfer<Place<T>>>,
    pub results_out: VecDeque<Transfer<Arc<Place<T>>>>,
}

impl<T: Element> Default for Peer<T> {
    fn default() -> Self {
        Self {
            contributions: VecDeque::new(),
            contributions_out: VecDeque::new(),
            blocks_out: VecDeque::new(),
            expected: VecDeque::new(),
            results_in: VecDeque::new(),
            results_out: VecDeque::new(),
        }
    }
}

impl<T: Element> Peer<T> {
    /// Whether nothing is left to do with it.
    pub fn is_over(&self) -> bool {
        self.contributions.is_empty()
            && self.contributions_out.is_empty()
            && self.blocks_out.is_empty()
            && self.expected.is_empty()
            && self.results_in.is_empty()
            && self.results_out.is_empty()
    }

    /// Sends contributions to the peer, which is `rank`.
    pub fn contribute(
        &mut self,
        ctx: &Context,
        (group, seq): (usize, u64),
        rank: usize,
        in_flight: &InFlight,
        pools: &mut Pools<T>,
    ) -> Result<bool> {
        let mut moved = false;
        while let Some(sent) = poll_front(ctx, &mut self.contributions_out)? {
            pools.elements.give_back(sent.0);
            moved = true;
        }
        while let Some(sent) = poll_front(ctx, &mut self.blocks_out)? {
            pools.accumulated.give_back(sent.0);
            moved = true;
        }
        while self.contributions_out.len() < NUM_GATHERED
            && let Some((start, len)) = self.contributions.pop_front()
        {
            let mut copy = pools.elements.take(len);
            in_flight.read(start, len, |xs| copy.copy_from_slice(xs))?;
            let (comm, tag) = (ctx.groups[group].comm, tags::contribution(seq));
            let transfer = Transfer::send(&ctx.mpi, comm, rank, tag, copy)?;
            self.contributions_out.push_back(transfer);
            moved = true;
        }
        Ok(moved)
    }

    /// Receives results from the peer, and sees those to it off.
    pub fn exchange_results(
        &mut self,
        ctx: &Context,
        group: usize,
        (rank, tag): Lane,
        in_flight: &InFlight,
        pools: &mut Pools<T>,
    ) -> Result<bool> {
        let mut moved = false;
        while poll_front(ctx, &mut self.results_out)?.is_some() {
            moved = true;
        }
        while let Some((place, got)) = poll_front(ctx, &mut self.results_in)? {
            in_flight.check_size(rank, got, size_of_val(&*place))?;
            place.fill(in_flight)?;
            place.close(&mut pools.elements);
            moved = true;
        }
        while self.results_in.len() < NUM_RESULTS
            && let Some(room) = self.expected.pop_front()
        {
            let place = room.open(&mut pools.elements);
            let comm = ctx.groups[group].comm;
            let transfer = Transfer::receive(&ctx.mpi, comm, rank, tag, place)?;
            self.results_in.push_back(transfer);
            moved = true;
        }
        Ok(moved)
    }
}

/// Takes the first message off the queue if it is complete: messages between two ranks mostly end in their order.
fn poll_front<B: Lend>(
    ctx: &Context,
    queue: &mut VecDeque<Transfer<B>>,
) -> Result<Option<(B, usize)>> {
    if let Some(front) = queue.front_mut()
        && front.poll(&ctx.mpi)?
    {
        return Ok(queue.pop_front().and_then(Transfer::take));
    }
    Ok(None)
}
