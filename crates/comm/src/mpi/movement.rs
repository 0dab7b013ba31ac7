//! The data of a large collective on their way, leg by leg (see [`route`](super::route)).
//!
//! Every rank sends its contributions from copies of a leg's size, so that the input may be part of memory that others
//! use. The owner of a leg reduces straight into its output and sends from there; results of other owners are received
//! into their place. Only some legs are under way at once, so that the copies are few and stay in the cache.

use std::collections::VecDeque;
use std::sync::Arc;

use candle_core::Tensor;

use super::claim::Claim;
use super::context::Context;
use super::exchange::{read, tensor};
use super::gathering::Gathering;
use super::part::{Part, Region};
use super::route::{Leg, Route};
use super::tags;
use super::transfer::Transfer;
use crate::local::element::Element;
use crate::{Error, ReduceOp};

type Result<T> = std::result::Result<T, Error>;

/// Legs under way at once: contributions to one owner, and own legs.
const NUM_GATHERED: usize = 3;

/// Results under way at once, from or to one rank.
const NUM_RESULTS: usize = 6;

/// What a rank has to do with each of the other ranks.
struct Peer<T> {
    rank: usize,
    /// (first element of the input, number of elements) of the contributions to the peer's legs that are yet to be sent.
    contributions: VecDeque<(usize, usize)>,
    contributions_out: VecDeque<Transfer<Vec<T>>>,
    /// Where the results of the peer's legs go that are not being received yet.
    expected: VecDeque<Part<T>>,
    results_in: VecDeque<Transfer<Part<T>>>,
    results_out: VecDeque<Transfer<Arc<Part<T>>>>,
}

/// The data of a collective on their way.
pub(super) struct Movement<T> {
    place: (usize, u64),
    rank: usize,
    op: ReduceOp,
    dims: Vec<usize>,
    region: Arc<Region<T>>,
    /// By group rank; nothing is ever to be done with this rank itself.
    peers: Vec<Peer<T>>,
    /// Own legs that have not begun.
    own: VecDeque<(Leg, Part<T>)>,
    gathering: VecDeque<Gathering<T>>,
    spare: Vec<Vec<T>>,
    reads_input: bool,
}

impl<T: Element> Movement<T> {
    /// Plans the movement of rank `rank` for operation `place`, and copies what stays on this rank.
    pub fn new(
        route: Route,
        place: (usize, u64),
        rank: usize,
        claim: &Claim<Tensor>,
    ) -> Result<Self> {
        let Route {
            dims,
            op,
            world_size,
            legs,
        } = route;
        let is_mine = |leg: &&Leg| leg.destinations.iter().any(|(to, _)| *to == rank);
        let lens: Vec<usize> = legs.iter().filter(is_mine).map(|leg| leg.len).collect();
        let output = T::zeros(dims.iter().product());
        let cut = Region::cut(output, &lens);
        let (region, parts) = cut.ok_or_else(|| wrong_route(claim))?;
        let mut movement = Self {
            place,
            rank,
            op,
            dims,
            region,
            peers: (0..world_size).map(Peer::new).collect(),
            own: VecDeque::new(),
            gathering: VecDeque::new(),
            spare: Vec::new(),
            reads_input: true,
        };
        let mut parts = parts.into_iter();
        for leg in legs {
            let part = match is_mine(&&leg) {
                true => Some(parts.next().ok_or_else(|| wrong_route(claim))?),
                false => None,
            };
            movement.add(leg, part, claim)?;
        }
        Ok(movement)
    }

    /// Adds this rank's share of a leg; `part` is where the leg's result goes, if this rank wants it.
    fn add(&mut self, leg: Leg, part: Option<Part<T>>, claim: &Claim<Tensor>) -> Result<()> {
        if leg.owner == self.rank {
            let part = part.ok_or_else(|| wrong_route(claim))?;
            self.own.push_back((leg, part));
            return Ok(());
        }
        let peer = &mut self.peers[leg.owner];
        let source = leg.sources.iter().find(|(from, _)| *from == self.rank);
        if let Some((_, start)) = source {
            peer.contributions.push_back((*start, leg.len));
        }
        match (part, source, &leg.sources[..]) {
            // What is only copied, from here, is here.
            (Some(mut part), Some((_, start)), [_]) => {
                read(claim, *start, leg.len, |xs| part.copy_from_slice(xs))
            }
            (Some(part), ..) => {
                peer.expected.push_back(part);
                Ok(())
            }
            (None, ..) => Ok(()),
        }
    }

    /// Does what can be done; returns whether something was.
    pub fn poll(&mut self, ctx: &Context, claim: &Claim<Tensor>) -> Result<bool> {
        let mut moved = false;
        for index in 0..self.peers.len() {
            moved |= self.contribute(ctx, index, claim)?;
            moved |= self.exchange_results(ctx, index, claim)?;
        }
        moved |= self.gather(ctx, claim)?;
        let is_read = (self.peers.iter()).any(|peer| !peer.contributions.is_empty())
            || !self.own.is_empty()
            || !self.gathering.is_empty();
        if self.reads_input && !is_read {
            self.reads_input = false;
            claim.drop_input();
        }
        Ok(moved)
    }

    /// Sends contributions to one peer's legs.
    fn contribute(&mut self, ctx: &Context, index: usize, claim: &Claim<Tensor>) -> Result<bool> {
        let peer = &mut self.peers[index];
        let mut moved = false;
        while let Some(sent) = poll_front(ctx, &mut peer.contributions_out)? {
            self.spare.push(sent.0);
            moved = true;
        }
        while peer.contributions_out.len() < NUM_GATHERED
            && let Some((start, len)) = peer.contributions.pop_front()
        {
            let mut copy = room(&mut self.spare, len);
            read(claim, start, len, |xs| copy.copy_from_slice(xs))?;
            let (comm, tag) = (
                ctx.groups[self.place.0].comm,
                tags::contribution(self.place.1),
            );
            let transfer = Transfer::send(&ctx.mpi, comm, peer.rank, tag, copy)?;
            peer.contributions_out.push_back(transfer);
            moved = true;
        }
        Ok(moved)
    }

    /// Receives the results of one peer's legs, and sees those of own legs off.
    fn exchange_results(
        &mut self,
        ctx: &Context,
        index: usize,
        claim: &Claim<Tensor>,
    ) -> Result<bool> {
        let peer = &mut self.peers[index];
        let mut moved = false;
        while poll_front(ctx, &mut peer.results_out)?.is_some() {
            moved = true;
        }
        while let Some((part, got)) = poll_front(ctx, &mut peer.results_in)? {
            check_size(claim, peer.rank, got, size_of_val(&*part))?;
            moved = true;
        }
        while peer.results_in.len() < NUM_RESULTS
            && let Some(part) = peer.expected.pop_front()
        {
            let (comm, tag) = (ctx.groups[self.place.0].comm, tags::result(self.place.1));
            let transfer = Transfer::receive(&ctx.mpi, comm, peer.rank, tag, part)?;
            peer.results_in.push_back(transfer);
            moved = true;
        }
        Ok(moved)
    }

    /// Goes on with own legs.
    fn gather(&mut self, ctx: &Context, claim: &Claim<Tensor>) -> Result<bool> {
        let mut moved = false;
        let (comm, seq) = (ctx.groups[self.place.0].comm, self.place.1);
        while self.gathering.len() < NUM_GATHERED
            && (self.peers.iter()).all(|peer| peer.results_out.len() < NUM_RESULTS)
            && let Some((leg, part)) = self.own.pop_front()
        {
            let tag = tags::contribution(seq);
            let gathering =
                Gathering::begin((ctx, comm, tag), (leg, part), self.rank, &mut self.spare)?;
            self.gathering.push_back(gathering);
            moved = true;
        }
        while let Some(front) = self.gathering.front_mut()
            && front.poll(ctx, claim)?
            && let Some(gathered) = self.gathering.pop_front()
        {
            moved = true;
            let (part, others) = gathered.finish(self.op, claim, &mut self.spare)?;
            let part = Arc::new(part);
            for to in others {
                let tag = tags::result(seq);
                let transfer = Transfer::send(&ctx.mpi, comm, to, tag, part.clone())?;
                self.peers[to].results_out.push_back(transfer);
            }
        }
        Ok(moved)
    }

    /// Whether all data have come and gone.
    pub fn is_over(&self) -> bool {
        self.own.is_empty() && self.gathering.is_empty() && self.peers.iter().all(Peer::is_over)
    }

    /// The output of this rank.
    pub fn into_output(self, claim: &Claim<Tensor>) -> Result<Tensor> {
        let Self { region, dims, .. } = self;
        let output = region.into_vec().ok_or_else(|| wrong_route(claim))?;
        tensor(output, &dims)
    }
}

impl<T> Peer<T> {
    fn new(rank: usize) -> Self {
        Self {
            rank,
            contributions: VecDeque::new(),
            contributions_out: VecDeque::new(),
            expected: VecDeque::new(),
            results_in: VecDeque::new(),
            results_out: VecDeque::new(),
        }
    }

    fn is_over(&self) -> bool {
        self.contributions.is_empty()
            && self.contributions_out.is_empty()
            && self.expected.is_empty()
            && self.results_in.is_empty()
            && self.results_out.is_empty()
    }
}

/// Takes the first message off the queue if it is through: messages between two ranks mostly end in their order.
fn poll_front<B: super::transfer::Lend>(
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

/// A vector of `len` elements, of whatever values.
pub(super) fn room<T: Element>(spare: &mut Vec<Vec<T>>, len: usize) -> Vec<T> {
    match spare.iter().rposition(|vec| vec.len() == len) {
        Some(index) => spare.swap_remove(index),
        None => T::zeros(len),
    }
}

/// An error unless as many bytes came as should have.
pub(super) fn check_size(
    claim: &Claim<Tensor>,
    from: usize,
    got: usize,
    expected: usize,
) -> Result<()> {
    if got == expected {
        return Ok(());
    }
    Err(Error::Backend(format!(
        "{}: rank {from} of the group sent {got} bytes, expected {expected}\n\
         hint: all ranks must run the same version of the program",
        claim.call
    )))
}

fn wrong_route(claim: &Claim<Tensor>) -> Error {
    Error::Backend(format!("{}: its pieces do not fill its output", claim.call))
}
