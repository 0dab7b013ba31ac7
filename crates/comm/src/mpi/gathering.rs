//! One chunk of a collective at its owner, or at the collector of a host: the contributions, reduced
//! [pairwise](crate::pairwise).

use super::context::Context;
use super::in_flight::InFlight;
use super::place::{Buffers, Place};
use super::route::{Chunk, Contributor, Route};
use super::sys::Comm;
use super::tags;
use super::transfer::Transfer;
use crate::Error;
use crate::element::Element;
use crate::pairwise::{Term, Values, reduce, reduce_blocks};

type Result<T> = std::result::Result<T, Error>;

/// Vectors to be used again: of elements, and of accumulated values.
pub(super) struct Pools<T: Element> {
    pub elements: Buffers<T>,
    pub accumulated: Buffers<T::Acc>,
}

impl<T: Element> Default for Pools<T> {
    fn default() -> Self {
        Self {
            elements: Buffers::default(),
            accumulated: Buffers::default(),
        }
    }
}

/// A chunk at a rank that reduces contributions to it.
pub(super) struct Gathering<T: Element> {
    chunk: Chunk,
    rank: usize,
    /// Where the result goes, unless it is being received there; none at a collector.
    place: Option<Place<T>>,
    contributions: Vec<Contribution<T>>,
    /// The only contribution, received into its place.
    only: Option<(usize, Transfer<Place<T>>)>,
}

enum Contribution<T: Element> {
    /// This rank's input.
    Own,
    /// The input of a rank.
    Input(usize, Transfer<Vec<T>>),
    /// The blocks of a host, and the rank that sends them.
    Blocks((usize, usize), Transfer<Vec<T::Acc>>),
}

/// What has been received.
struct Received<T: Element> {
    inputs: Vec<(usize, Vec<T>)>,
    blocks: Vec<(usize, Vec<T::Acc>)>,
}

/// What a chunk has become.
pub(super) enum Gathered<T: Element> {
    /// At its owner, the result.
    Result(Place<T>),
    /// At a collector, the blocks of its host, for the owner.
    Blocks(Vec<T::Acc>),
}

impl<T: Element> Gathering<T> {
    /// Starts to receive the contributions to `chunk`, whose result goes to `place`, if this rank is its owner.
    pub fn begin(
        (ctx, comm, seq): (&Context, Comm, u64),
        (route, rank): (&Route, usize),
        (chunk, mut place): (Chunk, Option<Place<T>>),
        pools: &mut Pools<T>,
    ) -> Result<Self> {
        let (mut contributions, mut only) = (Vec::new(), None);
        let (tag, len) = (tags::contribution(seq), chunk.piece.len);
        for contributor in route.contributors(&chunk, rank) {
            let from = route.sender(&chunk, contributor);
            contributions.push(match contributor {
                Contributor::Rank(source) if source == rank => Contribution::Own,
                Contributor::Rank(source) => {
                    if chunk.piece.sources.only.is_some()
                        && let Some(place) = place.take()
                    {
                        let transfer = Transfer::receive(&ctx.mpi, comm, from, tag, place)?;
                        only = Some((source, transfer));
                        continue;
                    }
                    let room = pools.elements.take(len);
                    let transfer = Transfer::receive(&ctx.mpi, comm, from, tag, room)?;
                    Contribution::Input(source, transfer)
                }
                Contributor::Host(host) => {
                    let room = pools.accumulated.take(route.hosts.blocks(host).len() * len);
                    let transfer = Transfer::receive(&ctx.mpi, comm, from, tag, room)?;
                    Contribution::Blocks((host, from), transfer)
                }
            });
        }
        Ok(Self {
            chunk,
            rank,
            place,
            contributions,
            only,
        })
    }

    /// Bytes of the messages that it waits for, or has.
    pub fn num_bytes(&self) -> usize {
        let bytes = |contribution: &Contribution<T>| match contribution {
            Contribution::Own => 0,
            Contribution::Input(_, transfer) => transfer.num_bytes(),
            Contribution::Blocks(_, transfer) => transfer.num_bytes(),
        };
        self.contributions.iter().map(bytes).sum()
    }

    /// Whether this rank is the owner.
    pub fn is_own(&self) -> bool {
        self.chunk.owner == self.rank
    }

    /// Whether all contributions are here.
    pub fn poll(&mut self, ctx: &Context, in_flight: &InFlight) -> Result<bool> {
        if let Some((_, only)) = &mut self.only {
            if !only.poll(&ctx.mpi)? {
                return Ok(false);
            }
            if let Some((source, transfer)) = self.only.take()
                && let Some((place, got)) = transfer.take()
            {
                in_flight.check_size(source, got, size_of_val(&*place))?;
                self.place = Some(place);
            }
        }
        for contribution in &mut self.contributions {
            let is_here = match contribution {
                Contribution::Own => true,
                Contribution::Input(_, transfer) => transfer.poll(&ctx.mpi)?,
                Contribution::Blocks(_, transfer) => transfer.poll(&ctx.mpi)?,
            };
            if !is_here {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The chunk, and what it has become.
    pub fn finish(
        self,
        route: &Route,
        in_flight: &InFlight,
        pools: &mut Pools<T>,
    ) -> Result<(Chunk, Gathered<T>)> {
        let (chunk, rank) = (self.chunk, self.rank);
        let (len, first) = (chunk.piece.len, chunk.piece.sources.first);
        let reads_own = (self.contributions.iter()).any(|from| matches!(from, Contribution::Own));
        let has_come = self.contributions.is_empty();
        let received = Received::of(self.contributions, in_flight)?;
        let mut gathered = match self.place {
            Some(place) => Gathered::Result(place),
            None => {
                let num_blocks = route.hosts.blocks(route.hosts.host_of(rank)).len();
                Gathered::Blocks(pools.accumulated.take(num_blocks * len))
            }
        };
        let mut combine = |own: Option<&[T]>| {
            let terms = received.terms(route, own.map(|own| (rank, own)), len);
            match &mut gathered {
                Gathered::Result(place) => reduce(route.op, &terms, &mut [place]),
                Gathered::Blocks(results) => {
                    let world_size = route.hosts.world_size();
                    reduce_blocks(route.op, &terms, world_size, len, results);
                }
            }
        };
        match reads_own {
            true => in_flight.read(first, len, |own| combine(Some(own)))?,
            // The only contribution is in its place already.
            false if has_come => {}
            false => combine(None),
        }
        for (_, buffer) in received.inputs {
            pools.elements.give_back(buffer);
        }
        for (_, buffer) in received.blocks {
            pools.accumulated.give_back(buffer);
        }
        Ok((chunk, gathered))
    }
}

impl<T: Element> Received<T> {
    fn of(contributions: Vec<Contribution<T>>, in_flight: &InFlight) -> Result<Self> {
        let (mut inputs, mut blocks) = (Vec::new(), Vec::new());
        for contribution in contributions {
            match contribution {
                Contribution::Own => {}
                Contribution::Input(rank, transfer) => {
                    if let Some((values, got)) = transfer.take() {
                        in_flight.check_size(rank, got, size_of_val(&*values))?;
                        inputs.push((rank, values));
                    }
                }
                Contribution::Blocks((host, from), transfer) => {
                    if let Some((values, got)) = transfer.take() {
                        in_flight.check_size(from, got, size_of_val(&*values))?;
                        blocks.push((host, values));
                    }
                }
            }
        }
        Ok(Self { inputs, blocks })
    }

    /// In the order of the ranks, with this rank's own.
    fn terms<'a>(
        &'a self,
        route: &Route,
        own: Option<(usize, &'a [T])>,
        len: usize,
    ) -> Vec<Term<'a, T>> {
        let inputs = self.inputs.iter();
        let inputs = inputs.map(|(rank, values)| (*rank, &values[..]));
        let inputs = inputs.chain(own).map(|(rank, values)| Term {
            ranks: rank..rank + 1,
            values: Values::Input(values),
        });
        let blocks = self.blocks.iter().flat_map(|(host, values)| {
            let parts = route.hosts.blocks(*host).iter().zip(values.chunks(len));
            parts.map(|(ranks, values)| Term {
                ranks: ranks.clone(),
                values: Values::Combined(values),
            })
        });
        let mut terms: Vec<_> = inputs.chain(blocks).collect();
        terms.sort_by_key(|term| term.ranks.start);
        terms
    }
}
