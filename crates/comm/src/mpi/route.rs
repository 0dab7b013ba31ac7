//! Which rank does what for a collective.
//!
//! The work is that of the local backend ([`Plan`]), cut into chunks. Each chunk has an owner, who makes its result:
//!
//! ```text
//! inputs of a host's ranks -> collector of the host -> owner -> distributor of each other host -> its other ranks
//! ```
//! Collector and distributor take part in turns. On the owner's host the owner is both. A collector reduces what its host can reduce by itself, and
//! sends [blocks](crate::pairwise::blocks) of accumulated values; where these would be no fewer bytes than the inputs, the ranks send
//! these to the owner. What has one source goes from there to the owner. So what all ranks want enters each host once.
//!
//! `N` ranks on `H` hosts with `r` ranks each, whose blocks are one (`r` is a power of two); `S` is the size of the input, of the
//! output for all_gather. `w` is 1, or 2 for bf16 and f16 if `r > 1`, as these travel as f32 from
//! collector to owner. Bytes are sent; about as many are received:
//!
//! | operation | owner of a chunk | bytes per rank, one host | bytes per host's card |
//! |---|---|---|---|
//! | all_reduce | the ranks in turns | `2 (N-1)/N S` | `(1 + w) (H-1)/H S` |
//! | all_gather | who has it | `(N-1)/N S` | `(H-1)/H S` |
//! | reduce_scatter | who gets it | `(N-1)/N S` | `w (H-1)/H S` |
//! | all_to_all | who gets it | `(N-1)/N S` | `r (H-1)/H S` |
//! | broadcast | the ranks in turns | root `2 (N-1)/N S`, others `(N-2)/N S` | root's `2 (H-1)/H S`, others' `(H-1)/H S` |
//!
//! Before that the ranks [meet](super::meeting): each sends `N-1` messages, `r (N-r)` of them through its host's card. The messages
//! that follow one another for a chunk are 2 on one host, and on several 4 for all_reduce, 3 for broadcast, 2 for the others, but 1 for all_to_all.
//! With `a` and `1/b` for latency and bandwidth of the card, `a'` and `1/b'` inside a host, an all_reduce takes about
//!
//! ```text
//! (N-1) o + a + 2 (a + a') + (1 + w) (H-1)/H S b + 2 (r-1)/r S b'
//! ```
//! where `o` is what MPI takes for one message, and an operation of at most [`INLINE_BYTES`](super::header::INLINE_BYTES) per rank
//! only `(N-1) o + a + r (N-r) (S + 200 bytes) b`.

use std::sync::Arc;

use candle_core::Shape;

use super::hosts::Hosts;
use crate::plan::{Piece, Plan};
use crate::{Operation, ReduceOp};

/// What one message holds at most: little enough to stay in a cache while it is copied and reduced.
const CHUNK_BYTES: usize = 512 << 10;

/// What the messages of one operation that wait to be reduced hold at most, on one rank, for one chunk and for all others together.
pub(super) const WINDOW_BYTES: usize = 32 << 20;

/// A piece of the work with the rank that does it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chunk {
    pub owner: usize,
    pub piece: Piece,
    /// Whose turn it is on each host.
    turn: usize,
    /// Chunks of a lower round come first, so that all hosts' cards are busy all the time.
    pub round: usize,
}

/// Who contributes to a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Contributor {
    /// The input of this rank.
    Rank(usize),
    /// From its collector, the blocks of this host.
    Host(usize),
}

/// The chunks of a collective, and who does what for them.
pub(super) struct Route {
    /// The shape of each output.
    pub dims: Vec<usize>,
    pub op: ReduceOp,
    pub hosts: Arc<Hosts>,
    /// Bytes of an accumulated value for each byte of an input's.
    widening: usize,
    /// They fill every output from its first element to its last, in this order, without gaps.
    pub chunks: Vec<Chunk>,
}

impl Route {
    /// The route for one input of this shape for each rank, as far as `rank` has to do with it. An element has `element_bytes`,
    /// `widening` times as many where values are accumulated.
    pub fn new(
        operation: &Operation,
        shape: &Shape,
        hosts: Arc<Hosts>,
        rank: usize,
        (element_bytes, widening): (usize, usize),
    ) -> Self {
        let world_size = hosts.world_size();
        let Plan { dims, op, pieces } = Plan::new(operation, shape, world_size, Some(rank));
        let in_turns = matches!(
            operation,
            Operation::AllReduce(_) | Operation::Broadcast { .. }
        );
        let num_ranks = |host: usize| hosts.ranks(host).len();
        let num_contributions = (0..hosts.len()).map(num_ranks).max().unwrap_or(0)
            + (0..hosts.len())
                .map(|host| num_ranks(host).min(hosts.blocks(host).len() * widening))
                .sum::<usize>();
        let chunk_bytes = CHUNK_BYTES.min(WINDOW_BYTES / num_contributions.max(1));
        let longest = (chunk_bytes.max(4096) / element_bytes.max(1)).max(1);
        let chunks = pieces.into_iter().enumerate().flat_map(|(index, piece)| {
            let turn_len = piece.len.div_ceil(world_size).next_multiple_of(64);
            // Everybody gets a turn; whole cache lines.
            let longest = if in_turns {
                longest.min(turn_len)
            } else {
                longest
            };
            let parts = piece.cut(longest).enumerate();
            parts.map(move |(round, piece)| {
                let gives_or_gets = piece.destinations.only.or(piece.sources.only);
                Chunk {
                    owner: match gives_or_gets {
                        Some(rank) if !in_turns => rank,
                        _ => round % world_size,
                    },
                    piece,
                    turn: index + round,
                    round,
                }
            })
        });
        Self {
            chunks: chunks.collect(),
            dims,
            op,
            hosts,
            widening,
        }
    }

    /// The rank of a host whose turn it is, which is not the only source, for this has the chunk; none if there is no other.
    fn in_turn(&self, chunk: &Chunk, host: usize) -> Option<usize> {
        let ranks = self.hosts.ranks(host);
        let others = || ranks.iter().cycle().skip(chunk.turn % ranks.len());
        let mut others = others().take(2);
        others
            .find(|rank| chunk.piece.sources.only != Some(**rank))
            .copied()
    }

    /// Whether a host sends fewer bytes if it reduces what it has first.
    fn reduces(&self, host: usize) -> bool {
        self.hosts.blocks(host).len() * self.widening < self.hosts.ranks(host).len()
    }

    /// Who takes in the input of `rank`, a source.
    pub fn collector(&self, chunk: &Chunk, rank: usize) -> usize {
        let (host, there) = (self.hosts.host_of(rank), self.hosts.host_of(chunk.owner));
        if host == there || chunk.piece.sources.only.is_some() || !self.reduces(host) {
            return chunk.owner;
        }
        self.in_turn(chunk, host).unwrap_or(chunk.owner)
    }

    /// Whether `rank` reduces contributions, as the owner or for it.
    pub fn gathers(&self, chunk: &Chunk, rank: usize) -> bool {
        rank == chunk.owner
            || (chunk.piece.sources.only.is_none() && self.collector(chunk, rank) == rank)
    }

    /// From whom `rank`, which [gathers](Self::gathers), does so.
    pub fn contributors(&self, chunk: &Chunk, rank: usize) -> Vec<Contributor> {
        if let Some(source) = chunk.piece.sources.only {
            return vec![Contributor::Rank(source)];
        }
        let inputs = |host: usize| {
            let ranks = self.hosts.ranks(host).iter();
            ranks.map(|rank| Contributor::Rank(*rank))
        };
        let here = self.hosts.host_of(rank);
        let mut contributors: Vec<Contributor> = inputs(here).collect();
        if rank == chunk.owner {
            for host in (0..self.hosts.len()).filter(|host| *host != here) {
                match self.reduces(host) {
                    true => contributors.push(Contributor::Host(host)),
                    false => contributors.extend(inputs(host)),
                }
            }
        }
        contributors
    }

    /// The rank that the message of a contributor comes from.
    pub fn sender(&self, chunk: &Chunk, contributor: Contributor) -> usize {
        match contributor {
            Contributor::Rank(rank) => rank,
            Contributor::Host(host) => self.in_turn(chunk, host).unwrap_or(chunk.owner),
        }
    }

    /// From whom `rank`, which wants the result and has no part in it as the owner or the only source, gets it.
    pub fn distributor(&self, chunk: &Chunk, rank: usize) -> usize {
        let (host, there) = (self.hosts.host_of(rank), self.hosts.host_of(chunk.owner));
        match self.in_turn(chunk, host) {
            Some(distributor) if host != there && distributor != rank => distributor,
            _ => chunk.owner,
        }
    }

    /// To whom `rank`, which has the result, sends it.
    pub fn receivers(&self, chunk: &Chunk, rank: usize) -> Vec<usize> {
        let here = self.hosts.host_of(rank);
        let (piece, owns) = (&chunk.piece, rank == chunk.owner);
        if piece.destinations.only.is_some() || piece.sources.only == Some(rank) && !owns {
            return Vec::new();
        }
        let mut receivers = Vec::new();
        if owns || self.distributor_here(chunk, rank) {
            let others = self.hosts.ranks(here).iter().copied();
            receivers.extend(others.filter(|to| *to != rank && piece.sources.only != Some(*to)));
        }
        if owns {
            let hosts = (0..self.hosts.len()).filter(|host| *host != here);
            receivers.extend(hosts.filter_map(|host| self.in_turn(chunk, host)));
        }
        receivers
    }

    /// Whether `rank` is its host's distributor.
    fn distributor_here(&self, chunk: &Chunk, rank: usize) -> bool {
        let (here, there) = (self.hosts.host_of(rank), self.hosts.host_of(chunk.owner));
        here != there && self.in_turn(chunk, here) == Some(rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPERATIONS: [Operation; 5] = [
        Operation::AllReduce(ReduceOp::Sum),
        Operation::AllGather,
        Operation::ReduceScatter(ReduceOp::Max),
        Operation::AllToAll,
        Operation::Broadcast { root: 2 },
    ];

    /// A message: chunk, sender, receiver, bytes.
    type Message = (usize, usize, usize, usize);

    fn routes(
        operation: &Operation,
        shape: &Shape,
        hosts: &[usize],
        sizes: (usize, usize),
    ) -> Vec<Route> {
        let hosts = Arc::new(Hosts::new(hosts));
        (0..hosts.world_size())
            .map(|rank| Route::new(operation, shape, hosts.clone(), rank, sizes))
            .collect()
    }

    /// What all ranks send, and what all ranks receive.
    fn messages(routes: &[Route], (element_bytes, widening): (usize, usize)) -> [Vec<Message>; 2] {
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        for (rank, route) in routes.iter().enumerate() {
            for chunk in &route.chunks {
                let Piece {
                    sources,
                    destinations,
                    len,
                } = chunk.piece;
                let place = (sources.first * 1_000_003 + destinations.first) * 1009
                    + sources.only.map_or(0, |rank| rank + 1) * 31
                    + destinations.only.map_or(0, |rank| rank + 1);
                let bytes = len * element_bytes;
                let blocks = |host| route.hosts.blocks(host).len() * bytes * widening;
                let host = route.hosts.host_of(rank);
                let gathers = route.gathers(chunk, rank);
                if gathers {
                    for from in route.contributors(chunk, rank) {
                        let bytes = match from {
                            Contributor::Rank(_) => bytes,
                            Contributor::Host(host) => blocks(host),
                        };
                        received.push((place, route.sender(chunk, from), rank, bytes));
                    }
                    if rank != chunk.owner {
                        sent.push((place, rank, chunk.owner, blocks(host)));
                    }
                }
                if sources.has(rank) {
                    let to = if gathers {
                        rank
                    } else {
                        route.collector(chunk, rank)
                    };
                    sent.push((place, rank, to, bytes));
                }
                let has_it = rank == chunk.owner || sources.only == Some(rank);
                if destinations.has(rank) && !has_it {
                    let from = route.distributor(chunk, rank);
                    received.push((place, from, rank, bytes));
                }
                if has_it || destinations.has(rank) {
                    let receivers = route.receivers(chunk, rank).into_iter();
                    sent.extend(receivers.map(|to| (place, rank, to, bytes)));
                }
            }
        }
        sent.sort_unstable();
        received.sort_unstable();
        [sent, received]
    }

    /// Bytes that `sender` of each message sends to another one.
    fn sum(
        messages: &[Message],
        num_senders: usize,
        sender: impl Fn(usize) -> usize,
    ) -> Vec<usize> {
        let mut sums = vec![0; num_senders];
        for (_, from, to, bytes) in messages {
            if sender(*from) != sender(*to) {
                sums[sender(*from)] += bytes;
            }
        }
        sums
    }

    #[test]
    fn bytes_on_one_host_are_those_of_a_ring() {
        let (shape, size) = (Shape::from((4096, 1024)), 4096 * 1024 * 4);
        let sent = |operation: &Operation| {
            let routes = routes(operation, &shape, &[0; 4], (4, 1));
            sum(&messages(&routes, (4, 1))[0], 4, |rank| rank)
        };
        let [
            all_reduce,
            all_gather,
            reduce_scatter,
            all_to_all,
            broadcast,
        ] = OPERATIONS.each_ref().map(sent);
        assert_eq!(all_reduce, [2 * size / 4 * 3; 4]);
        assert_eq!(all_gather, [size * 3; 4]);
        assert_eq!(reduce_scatter, [size / 4 * 3; 4]);
        assert_eq!(all_to_all, [size / 4 * 3; 4]);
        assert_eq!(broadcast, [2, 2, 6, 2].map(|part| size / 4 * part));
    }

    /// As the table says.
    #[test]
    fn bytes_of_a_card() {
        let (num_hosts, r) = (4, 4);
        let hosts: Vec<usize> = (0..num_hosts * r).map(|rank| rank / r).collect();
        for (element_bytes, widening) in [(4, 1), (2, 2)] {
            let (sizes, size) = ((element_bytes, widening), 4096 * 4096 * element_bytes);
            let [
                all_reduce,
                all_gather,
                reduce_scatter,
                all_to_all,
                broadcast,
            ] = OPERATIONS.each_ref().map(|operation| {
                let routes = routes(operation, &Shape::from((4096, 4096)), &hosts, sizes);
                sum(&messages(&routes, sizes)[0], num_hosts, |rank| hosts[rank])
            });
            let others = size / num_hosts * (num_hosts - 1);
            assert_eq!(all_reduce, [(1 + widening) * others; 4]);
            assert_eq!(all_gather, [others * num_hosts * r; 4]);
            assert_eq!(reduce_scatter, [widening * others; 4]);
            assert_eq!(all_to_all, [r * others; 4]);
            assert_eq!(broadcast, [2, 1, 1, 1].map(|part| part * others));
        }
    }

    /// Each message that one rank sends another one receives, whatever the layout; and what all want enters a host once.
    #[test]
    fn ranks_agree_on_the_messages() {
        let layouts: [&[usize]; 8] = [
            &[0],
            &[0, 0, 0],
            &[0, 1, 2],
            &[0, 0, 1, 1, 2],
            &[0, 0, 0, 1, 1, 1, 2],
            &[0, 1, 0, 1, 0, 1],
            &[0, 0, 0, 0, 1, 1, 1, 2, 2],
            &[2, 2, 2, 2, 0, 2, 1, 1],
        ];
        for hosts in layouts {
            let n = hosts.len();
            for operation in &OPERATIONS {
                if matches!(operation, Operation::Broadcast { root } if *root >= n) {
                    continue;
                }
                for sizes in [(4, 1), (2, 2)] {
                    let shape = Shape::from((n * 7, 30_011));
                    let routes = routes(operation, &shape, hosts, sizes);
                    let [sent, received] = messages(&routes, sizes);
                    assert_eq!(sent, received, "{operation} on {hosts:?}");
                    for chunk in routes.iter().flat_map(|route| &route.chunks) {
                        assert!(chunk.piece.len * sizes.0 <= CHUNK_BYTES && chunk.piece.len > 0);
                        assert!(chunk.piece.destinations.has(chunk.owner));
                    }
                }
            }
        }
    }

    /// A chunk's contributions, wherever they are gathered and however the ranks lie on hosts.
    #[test]
    fn contributions_fit_a_window() {
        for (num_hosts, r) in [(64, 8), (64, 2), (64, 6), (512, 1), (1, 512)] {
            for cyclic in [false, true] {
                let n = num_hosts * r;
                let host_of = |rank: usize| if cyclic { rank % num_hosts } else { rank / r };
                let hosts: Vec<usize> = (0..n).map(host_of).collect();
                let hosts = Arc::new(Hosts::new(&hosts));
                for (element_bytes, widening) in [(4, 1), (2, 2)] {
                    let sum = Operation::AllReduce(ReduceOp::Sum);
                    let shape = Shape::from(64 << 20);
                    let sizes = (element_bytes, widening);
                    let route = Route::new(&sum, &shape, hosts.clone(), 3, sizes);
                    let chunk = route.chunks.iter().find(|chunk| chunk.owner == 3).unwrap();
                    let held = |from: &Contributor| match from {
                        Contributor::Rank(_) => 1,
                        Contributor::Host(host) => hosts.blocks(*host).len() * widening,
                    };
                    let num: usize = route.contributors(chunk, 3).iter().map(held).sum();
                    let bytes = num * chunk.piece.len * element_bytes;
                    assert!(bytes <= WINDOW_BYTES, "{num_hosts} x {r}: {bytes}");
                }
            }
        }
    }

    /// However many ranks there are.
    #[test]
    fn a_plan_is_as_large_as_its_chunks() {
        let hosts: Vec<usize> = (0..4096).map(|rank| rank / 64).collect();
        for operation in &OPERATIONS {
            let shape = Shape::from((4096, 16));
            let hosts = Arc::new(Hosts::new(&hosts));
            let route = Route::new(operation, &shape, hosts, 77, (4, 1));
            assert!(
                route.chunks.len() < 2 * 4096,
                "{operation}: {}",
                route.chunks.len()
            );
        }
        assert!(size_of::<Chunk>() <= 96);
    }
}
