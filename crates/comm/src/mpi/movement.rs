//! The data of a large collective on their way, chunk by chunk (see [`route`](super::route)).
//!
//! Every rank sends its contributions from copies of a chunk's size, so that the input may be part of memory that others
//! use. The owner of a chunk reduces straight into its output and sends from there; results of other owners are received
//! into their place, or, if the output is a tensor that others may use parts of, by way of such copies. Only some chunks are under way at once, so that the copies are few and stay in the cache.

use std::collections::VecDeque;
use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::context::Context;
use super::gathering::Gathering;
use super::in_flight::InFlight;
use super::part::Region;
use super::place::{Buffers, Place, Room};
use super::route::{Chunk, Route};
use super::tags;
use super::transfer::Transfer;
use crate::element::Element;
use crate::{Error, ReduceOp};

type Result<T> = std::result::Result<T, Error>;

/// Chunks under way at once: contributions to one owner, and own chunks.
const NUM_GATHERED: usize = 3;

/// Results under way at once, from or to one rank.
const NUM_RESULTS: usize = 6;

/// What a rank has to do with each of the other ranks.
struct Peer<T> {
    rank: usize,
    /// (first element of the input, number of elements) of the contributions to the peer's chunks that are yet to be sent.
    contributions: VecDeque<(usize, usize)>,
    contributions_out: VecDeque<Transfer<Vec<T>>>,
    /// Where the results of the peer's chunks go that are not being received yet.
    expected: VecDeque<Room<T>>,
    results_in: VecDeque<Transfer<Place<T>>>,
    results_out: VecDeque<Transfer<Arc<Place<T>>>>,
}

/// The data of a collective on their way.
pub(super) struct Movement<T> {
    place: (usize, u64),
    rank: usize,
    op: ReduceOp,
    dims: Vec<usize>,
    /// The output's memory, if that is new.
    region: Option<Arc<Region<T>>>,
    /// By group rank; nothing is ever to be done with this rank itself.
    peers: Vec<Peer<T>>,
    /// Own chunks that have not begun.
    own: VecDeque<(Chunk, Room<T>)>,
    gathering: VecDeque<Gathering<T>>,
    buffers: Buffers<T>,
    reads_input: bool,
}

impl<T: Element> Movement<T> {
    /// Plans the movement of rank `rank` for operation `place`, and copies what stays on this rank.
    pub fn new(
        route: Route,
        place: (usize, u64),
        rank: usize,
        in_flight: &InFlight,
    ) -> Result<Self> {
        let Route {
            dims,
            op,
            world_size,
            chunks,
        } = route;
        let place_here = |chunk: &Chunk| {
            chunk
                .destinations
                .iter()
                .find(|(to, _)| *to == rank)
                .copied()
        };
        let mine = chunks
            .iter()
            .filter_map(|chunk| Some((place_here(chunk)?.1, chunk.len)));
        let (region, rooms): (_, Vec<Room<T>>) = if in_flight.is_in_place() {
            (
                None,
                mine.map(|(first, len)| Room::Given(first, len)).collect(),
            )
        } else {
            let lens: Vec<usize> = mine.map(|(_, len)| len).collect();
            let cut = Region::cut(T::zeros(dims.iter().product()), &lens);
            let (region, parts) = cut.ok_or_else(|| wrong_route(in_flight))?;
            (Some(region), parts.into_iter().map(Room::Part).collect())
        };
        let mut movement = Self {
            place,
            rank,
            op,
            dims,
            region,
            peers: (0..world_size).map(Peer::new).collect(),
            own: VecDeque::new(),
            gathering: VecDeque::new(),
            buffers: Buffers::new(),
            reads_input: true,
        };
        let mut rooms = rooms.into_iter();
        for chunk in chunks {
            let room = match place_here(&chunk) {
                Some(_) => Some(rooms.next().ok_or_else(|| wrong_route(in_flight))?),
                None => None,
            };
            movement.add(chunk, room, in_flight)?;
        }
        Ok(movement)
    }

    /// Adds this rank's share of a chunk; `room` is for the chunk's result, if this rank wants it.
    fn add(&mut self, chunk: Chunk, room: Option<Room<T>>, in_flight: &InFlight) -> Result<()> {
        if chunk.owner == self.rank {
            let room = room.ok_or_else(|| wrong_route(in_flight))?;
            self.own.push_back((chunk, room));
            return Ok(());
        }
        let peer = &mut self.peers[chunk.owner];
        let source = chunk.sources.iter().find(|(from, _)| *from == self.rank);
        if let Some((_, start)) = source {
            peer.contributions.push_back((*start, chunk.len));
        }
        match (room, source, &chunk.sources[..]) {
            // What is only copied, from here, is here.
            (Some(room), Some((_, start)), [_]) => {
                let mut place = room.open(&mut self.buffers);
                in_flight.read(*start, chunk.len, |xs| place.copy_from_slice(xs))?;
                place.fill(in_flight)?;
                place.close(&mut self.buffers);
            }
            (Some(room), ..) => peer.expected.push_back(room),
            (None, ..) => {}
        }
        Ok(())
    }

    /// Does what can be done; returns whether something was.
    pub fn poll(&mut self, ctx: &Context, in_flight: &InFlight) -> Result<bool> {
        let mut moved = false;
        for index in 0..self.peers.len() {
            moved |= self.contribute(ctx, index, in_flight)?;
            moved |= self.exchange_results(ctx, index, in_flight)?;
        }
        moved |= self.gather(ctx, in_flight)?;
        let is_read = (self.peers.iter()).any(|peer| !peer.contributions.is_empty())
            || !self.own.is_empty()
            || !self.gathering.is_empty();
        if self.reads_input && !is_read {
            self.reads_input = false;
            in_flight.drop_input();
        }
        Ok(moved)
    }

    /// Sends contributions to one peer's chunks.
    fn contribute(&mut self, ctx: &Context, index: usize, in_flight: &InFlight) -> Result<bool> {
        let peer = &mut self.peers[index];
        let mut moved = false;
        while let Some(sent) = poll_front(ctx, &mut peer.contributions_out)? {
            self.buffers.give_back(sent.0);
            moved = true;
        }
        while peer.contributions_out.len() < NUM_GATHERED
            && let Some((start, len)) = peer.contributions.pop_front()
        {
            let mut copy = self.buffers.take(len);
            in_flight.read(start, len, |xs| copy.copy_from_slice(xs))?;
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

    /// Receives the results of one peer's chunks, and sees those of own chunks off.
    fn exchange_results(
        &mut self,
        ctx: &Context,
        index: usize,
        in_flight: &InFlight,
    ) -> Result<bool> {
        let peer = &mut self.peers[index];
        let mut moved = false;
        while poll_front(ctx, &mut peer.results_out)?.is_some() {
            moved = true;
        }
        while let Some((place, got)) = poll_front(ctx, &mut peer.results_in)? {
            in_flight.check_size(peer.rank, got, size_of_val(&*place))?;
            place.fill(in_flight)?;
            place.close(&mut self.buffers);
            moved = true;
        }
        while peer.results_in.len() < NUM_RESULTS
            && let Some(room) = peer.expected.pop_front()
        {
            let place = room.open(&mut self.buffers);
            let (comm, tag) = (ctx.groups[self.place.0].comm, tags::result(self.place.1));
            let transfer = Transfer::receive(&ctx.mpi, comm, peer.rank, tag, place)?;
            peer.results_in.push_back(transfer);
            moved = true;
        }
        Ok(moved)
    }

    /// Goes on with own chunks.
    fn gather(&mut self, ctx: &Context, in_flight: &InFlight) -> Result<bool> {
        let mut moved = false;
        let (comm, seq) = (ctx.groups[self.place.0].comm, self.place.1);
        while self.gathering.len() < NUM_GATHERED
            && (self.peers.iter()).all(|peer| peer.results_out.len() < NUM_RESULTS)
            && let Some((chunk, room)) = self.own.pop_front()
        {
            let place = room.open(&mut self.buffers);
            let tag = tags::contribution(seq);
            let gathering = Gathering::begin(
                (ctx, comm, tag),
                (chunk, place),
                self.rank,
                &mut self.buffers,
            )?;
            self.gathering.push_back(gathering);
            moved = true;
        }
        while let Some(front) = self.gathering.front_mut()
            && front.poll(ctx, in_flight)?
            && let Some(gathered) = self.gathering.pop_front()
        {
            moved = true;
            let (place, others) = gathered.finish(self.op, in_flight, &mut self.buffers)?;
            place.fill(in_flight)?;
            let place = Arc::new(place);
            for to in others {
                let tag = tags::result(seq);
                let transfer = Transfer::send(&ctx.mpi, comm, to, tag, place.clone())?;
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
    pub fn into_output(self, in_flight: &InFlight) -> Result<Tensor> {
        let Self { region, dims, .. } = self;
        let output = match region {
            Some(region) => region.into_vec().ok_or_else(|| wrong_route(in_flight))?,
            None => match in_flight.place() {
                Some(place) => return Ok(place),
                // It has been given up, and nobody waits.
                None => T::zeros(dims.iter().product()),
            },
        };
        Tensor::from_vec(output, dims, &Device::Cpu).map_err(Error::of_backend)
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

/// Takes the first message off the queue if it is complete: messages between two ranks mostly end in their order.
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

fn wrong_route(in_flight: &InFlight) -> Error {
    Error::Backend(format!(
        "{}: its pieces do not fill its output",
        in_flight.call
    ))
}
