//! The data of a large collective on their way, chunk by chunk (see [`route`](super::route)).
//!
//! Every rank sends its contributions from copies of a chunk's size, so that the input may be part of memory that others
//! use. The owner of a chunk reduces straight into its output and sends from there; results of other owners are received
//! into their place and sent on from there, or, if the output is a tensor that others may use parts of, by way of such copies. Only
//! some chunks are under way at once, so that the copies are few and stay in the cache.
//!
//! All ranks take chunks in one order, and none that is under way waits for a later one, so the first that is left always moves.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_int;
use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::context::Context;
use super::gathering::{Gathered, Gathering, Pools};
use super::in_flight::InFlight;
use super::part::Region;
use super::peer::{Lane, NUM_GATHERED, NUM_RESULTS, Peer};
use super::place::{Place, Room};
use super::route::{Chunk, Route, WINDOW_BYTES};
use super::tags;
use super::transfer::Transfer;
use crate::Error;
use crate::element::Element;

type Result<T> = std::result::Result<T, Error>;

/// Of several hosts, as many as keep the ways between them busy: of the chunks that are gathered here, one in so many as there are
/// hosts waits for other hosts.
const MOST_WINDOWS: usize = 4;

/// The data of a collective on their way.
pub(super) struct Movement<T: Element> {
    place: (usize, u64),
    rank: usize,
    /// Its chunks are in the queues here.
    route: Route,
    /// The output's memory, if that is new.
    region: Option<Arc<Region<T>>>,
    /// By group rank, and the tag of results.
    peers: BTreeMap<Lane, Peer<T>>,
    /// Chunks to be gathered here that have not begun; those that are this rank's own have room for their result.
    own: VecDeque<(Chunk, Option<Room<T>>)>,
    gathering: VecDeque<Gathering<T>>,
    /// Chunks from other hosts, to be distributed on this one, that are not being received yet.
    passing: VecDeque<(Chunk, Room<T>)>,
    passing_in: VecDeque<(Chunk, Transfer<Place<T>>)>,
    pools: Pools<T>,
    reads_input: bool,
}

impl<T: Element> Movement<T> {
    /// Plans the movement of rank `rank` for operation `place`, and copies what stays on this rank.
    pub fn new(
        mut route: Route,
        place: (usize, u64),
        rank: usize,
        in_flight: &InFlight,
    ) -> Result<Self> {
        let chunks = std::mem::take(&mut route.chunks);
        let is_mine = |chunk: &Chunk| chunk.piece.destinations.has(rank);
        let mine = (chunks.iter().filter(|chunk| is_mine(chunk)))
            .map(|chunk| (chunk.piece.destinations.first, chunk.piece.len));
        let (region, rooms): (_, Vec<Room<T>>) = if in_flight.is_in_place() {
            (
                None,
                mine.map(|(first, len)| Room::Given(first, len)).collect(),
            )
        } else {
            let lens: Vec<usize> = mine.map(|(_, len)| len).collect();
            let cut = Region::cut(T::zeros(route.dims.iter().product()), &lens);
            let (region, parts) = cut.ok_or_else(|| wrong_route(in_flight))?;
            (Some(region), parts.into_iter().map(Room::Part).collect())
        };
        let mut rooms = rooms.into_iter();
        let mut chunks: Vec<(Chunk, Option<Room<T>>)> = chunks
            .into_iter()
            .map(|chunk| (chunk, if is_mine(&chunk) { rooms.next() } else { None }))
            .collect();
        chunks.sort_by_key(|(chunk, _)| chunk.round);
        let mut movement = Self {
            place,
            rank,
            route,
            region,
            peers: BTreeMap::new(),
            own: VecDeque::new(),
            gathering: VecDeque::new(),
            passing: VecDeque::new(),
            passing_in: VecDeque::new(),
            pools: Pools::default(),
            reads_input: true,
        };
        for (chunk, room) in chunks {
            movement.add(chunk, room, in_flight)?;
        }
        Ok(movement)
    }

    /// Adds this rank's share of a chunk; `room` is for the chunk's result, if this rank wants it.
    fn add(&mut self, chunk: Chunk, room: Option<Room<T>>, in_flight: &InFlight) -> Result<()> {
        let (rank, sources) = (self.rank, chunk.piece.sources);
        let is_owner = chunk.owner == rank;
        if !self.route.gathers(&chunk, rank) && sources.has(rank) {
            let collector = self.route.collector(&chunk, rank);
            let contribution = (sources.first, chunk.piece.len);
            let peer = self.peer((collector, tags::result(self.place.1)));
            peer.contributions.push_back(contribution);
        }
        match room {
            room if is_owner => {
                let room = room.ok_or_else(|| wrong_route(in_flight))?;
                self.own.push_back((chunk, Some(room)));
                return Ok(());
            }
            // What is only copied, from here, is here.
            Some(room) if sources.only == Some(rank) => {
                let mut place = room.open(&mut self.pools.elements);
                in_flight.read(sources.first, chunk.piece.len, |xs| {
                    place.copy_from_slice(xs);
                })?;
                place.fill(in_flight)?;
                place.close(&mut self.pools.elements);
            }
            Some(room) if !self.route.receivers(&chunk, rank).is_empty() => {
                self.passing.push_back((chunk, room));
            }
            Some(room) => {
                let from = self.route.distributor(&chunk, rank);
                let tag = match from == chunk.owner {
                    true => tags::result(self.place.1),
                    false => tags::distributed(self.place.1),
                };
                self.peer((from, tag)).expected.push_back(room);
            }
            None => {}
        }
        if self.route.gathers(&chunk, rank) {
            self.own.push_back((chunk, None));
        }
        Ok(())
    }

    fn peer(&mut self, lane: Lane) -> &mut Peer<T> {
        self.peers.entry(lane).or_default()
    }

    /// Does what can be done; returns whether something was.
    pub fn poll(&mut self, ctx: &Context, in_flight: &InFlight) -> Result<bool> {
        let place = self.place;
        let mut moved = false;
        for (lane, peer) in &mut self.peers {
            moved |= peer.contribute(ctx, place, lane.0, in_flight, &mut self.pools)?;
            moved |= peer.exchange_results(ctx, place.0, *lane, in_flight, &mut self.pools)?;
        }
        moved |= self.gather(ctx, in_flight)?;
        moved |= self.pass_on(ctx, in_flight)?;
        let is_read = (self.peers.values()).any(|peer| !peer.contributions.is_empty())
            || !self.own.is_empty()
            || !self.gathering.is_empty();
        if self.reads_input && !is_read {
            self.reads_input = false;
            in_flight.drop_input();
        }
        Ok(moved)
    }

    /// Whether no rank has many results with this tag to come from here.
    fn may_send_results(&self, tag: c_int) -> bool {
        let mut lanes = self.peers.iter().filter(|(lane, _)| lane.1 == tag);
        lanes.all(|(_, peer)| peer.results_out.len() < NUM_RESULTS)
    }

    /// Goes on with the chunks that are gathered here.
    fn gather(&mut self, ctx: &Context, in_flight: &InFlight) -> Result<bool> {
        let mut moved = false;
        let (comm, seq) = (ctx.groups[self.place.0].comm, self.place.1);
        let num_gathered = NUM_GATHERED * self.route.hosts.len().min(MOST_WINDOWS);
        while self.gathering.len() < num_gathered
            && self
                .gathering
                .iter()
                .map(Gathering::num_bytes)
                .sum::<usize>()
                < WINDOW_BYTES
            && self.may_send_results(tags::result(seq))
            && (self.peers.values()).all(|peer| peer.blocks_out.len() < NUM_GATHERED)
            && let Some((chunk, room)) = self.own.pop_front()
        {
            let place = room.map(|room| room.open(&mut self.pools.elements));
            let gathering = Gathering::begin(
                (ctx, comm, seq),
                (&self.route, self.rank),
                (chunk, place),
                &mut self.pools,
            )?;
            self.gathering.push_back(gathering);
            moved = true;
        }
        // What goes to one rank is sent in the order of the chunks. Results and blocks do not wait for each other: both ways between
        // two hosts are busy at once.
        let (mut waits, mut index) = ([false; 2], 0);
        while let Some(gathering) = self.gathering.get_mut(index) {
            let waits = &mut waits[usize::from(gathering.is_own())];
            *waits = *waits || !gathering.poll(ctx, in_flight)?;
            let finished = if *waits {
                None
            } else {
                self.gathering.remove(index)
            };
            let Some(gathering) = finished else {
                index += 1;
                continue;
            };
            moved = true;
            let (chunk, gathered) = gathering.finish(&self.route, in_flight, &mut self.pools)?;
            match gathered {
                Gathered::Result(place) => {
                    place.fill(in_flight)?;
                    self.send_result(ctx, &chunk, place, tags::result(seq))?;
                }
                Gathered::Blocks(blocks) => {
                    let (to, tag) = (chunk.owner, tags::contribution(seq));
                    let transfer = Transfer::send(&ctx.mpi, comm, to, tag, blocks)?;
                    self.peer((to, tags::result(seq)))
                        .blocks_out
                        .push_back(transfer);
                }
            }
        }
        Ok(moved)
    }

    /// Goes on with the chunks that come from other hosts, for all on this one.
    fn pass_on(&mut self, ctx: &Context, in_flight: &InFlight) -> Result<bool> {
        let mut moved = false;
        let (comm, seq) = (ctx.groups[self.place.0].comm, self.place.1);
        // From every other host.
        let num_passing = NUM_RESULTS.max(2 * self.route.hosts.len());
        while self.passing_in.len() < num_passing
            && self.may_send_results(tags::distributed(seq))
            && let Some((chunk, room)) = self.passing.pop_front()
        {
            let place = room.open(&mut self.pools.elements);
            let tag = tags::result(seq);
            let transfer = Transfer::receive(&ctx.mpi, comm, chunk.owner, tag, place)?;
            self.passing_in.push_back((chunk, transfer));
            moved = true;
        }
        while let Some((_, front)) = self.passing_in.front_mut()
            && front.poll(&ctx.mpi)?
            && let Some((chunk, transfer)) = self.passing_in.pop_front()
            && let Some((place, got)) = transfer.take()
        {
            moved = true;
            in_flight.check_size(chunk.owner, got, size_of_val(&*place))?;
            place.fill(in_flight)?;
            self.send_result(ctx, &chunk, place, tags::distributed(seq))?;
        }
        Ok(moved)
    }

    fn send_result(
        &mut self,
        ctx: &Context,
        chunk: &Chunk,
        place: Place<T>,
        tag: c_int,
    ) -> Result<()> {
        let (comm, place) = (ctx.groups[self.place.0].comm, Arc::new(place));
        for to in self.route.receivers(chunk, self.rank) {
            let transfer = Transfer::send(&ctx.mpi, comm, to, tag, place.clone())?;
            self.peer((to, tag)).results_out.push_back(transfer);
        }
        Ok(())
    }

    /// Whether all data have come and gone.
    pub fn is_over(&self) -> bool {
        self.own.is_empty()
            && self.gathering.is_empty()
            && self.passing.is_empty()
            && self.passing_in.is_empty()
            && self.peers.values().all(Peer::is_over)
    }

    /// The output of this rank.
    pub fn into_output(self, in_flight: &InFlight) -> Result<Tensor> {
        let Self { region, route, .. } = self;
        let dims = route.dims;
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

fn wrong_route(in_flight: &InFlight) -> Error {
    Error::Backend(format!(
        "{}: its pieces do not fill its output",
        in_flight.call
    ))
}
