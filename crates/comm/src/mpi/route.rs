//! Which rank does what for a collective.
//!
//! The work is that of the local backend ([`Plan`]), cut into chunks. Each chunk has an owner, who makes its result:
//!
//! ```text
//! inputs of a host's ranks -> collector of the host -> owner -> distributor of each other host -> its other ranks
//! ```
//! What that is for one rank is a list of [`Step`]s, all of one form.
//!
//! Collector and distributor take part in turns. On the owner's host the owner is both. A collector reduces what its host can reduce by itself, and
//! sends [blocks](crate::reduction::pairwise::blocks) of accumulated values; where these would be no fewer bytes than the inputs, the ranks send
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
//! | reduce | the root | others `S` | others' `w S` |
//! | scatter, gather | who gets it | what it has for others | what its ranks have for others |
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

use super::group::{Kind, MpiGroup};
use super::step::{Gives, Lane, Source, Step};
use crate::reduction::plan::{Piece, Plan};
use crate::{Operation, ReduceOp};

/// What one message holds at most: little enough to stay in a cache while it is copied and reduced.
const CHUNK_BYTES: usize = 512 << 10;

/// What the messages of one operation that wait to be reduced hold at most, on one rank, for one chunk and for all others together.
pub(super) const WINDOW_BYTES: usize = 32 << 20;

/// What one rank does for a collective.
pub(super) struct Route {
    pub op: ReduceOp,
    pub group: Arc<MpiGroup>,
    /// Bytes of an element, and how many times as many where values are accumulated.
    sizes: (usize, usize),
    /// In the order in which they are begun. They fill the output without gaps.
    pub steps: Vec<Step>,
}

/// A piece of the work with the rank that makes its result.
struct Chunk {
    owner: usize,
    piece: Piece,
    /// Whose turn it is on each host.
    turn: usize,
}

impl Route {
    /// The route for one input of this shape for each rank, as far as this rank of the group has to do with it. An element has so many
    /// bytes, and so many times as many where values are accumulated.
    pub fn new(
        operation: &Operation,
        shape: &Shape,
        group: Arc<MpiGroup>,
        sizes: (usize, usize),
    ) -> Self {
        let world_size = group.members.len();
        let Plan { op, pieces } = Plan::new(operation, shape, world_size, Some(group.rank));
        let mut route = Self {
            op,
            group,
            sizes,
            steps: Vec::new(),
        };
        let in_turns = matches!(
            operation,
            Operation::AllReduce(_) | Operation::Broadcast { .. }
        );
        let longest = route.longest_chunk();
        let mut chunks = Vec::new();
        for (index, piece) in pieces.into_iter().enumerate() {
            let gives_or_gets = piece.destinations.only.or(piece.sources.only);
            let (owner, longest) = match in_turns {
                // Everybody gets a turn; whole cache lines.
                true => {
                    let turn = piece.len.div_ceil(world_size).next_multiple_of(64);
                    (None, longest.min(turn))
                }
                false => (gives_or_gets, longest),
            };
            let parts = piece.cut(longest).enumerate();
            chunks.extend(parts.map(|(round, piece)| {
                let owner = owner.unwrap_or(round % world_size);
                let turn = index + round;
                (round, Chunk { owner, piece, turn })
            }));
        }
        // So that all hosts' cards are busy all the time.
        chunks.sort_by_key(|(round, _)| *round);
        let steps = chunks.iter().flat_map(|(_, chunk)| route.steps(chunk));
        route.steps = steps.collect();
        route
    }

    /// Elements of a chunk whose contributions fit a window.
    fn longest_chunk(&self) -> usize {
        let (element_bytes, widening) = self.sizes;
        let hosts = &self.group.hosts;
        let most_ranks = hosts.ranks.iter().map(Vec::len).max().unwrap_or(0);
        let from_others = hosts.ranks.iter().zip(&hosts.blocks);
        let from_others = from_others.map(|(ranks, all)| ranks.len().min(all.len() * widening));
        let num_contributions = most_ranks + from_others.sum::<usize>();
        let chunk_bytes = CHUNK_BYTES.min(WINDOW_BYTES / num_contributions.max(1));
        (chunk_bytes.max(4096) / element_bytes.max(1)).max(1)
    }

    /// What this rank does for a chunk.
    fn steps(&self, chunk: &Chunk) -> Vec<Step> {
        let (rank, piece) = (self.group.rank, chunk.piece);
        let step = |lane, gives, targets, kind| self.step(chunk, lane, gives, (targets, kind));
        if chunk.owner == rank {
            let targets = self.targets(chunk);
            return vec![step(Lane::Gather, Gives::Result, targets, Kind::Result)];
        }
        let mut steps = Vec::new();
        if piece.sources.has(rank) {
            let to = self.collector(chunk, rank);
            let (lane, gives, to) = match to == rank {
                true => (Lane::Gather, Gives::Blocks, chunk.owner),
                false => (Lane::To(to), Gives::Copy, to),
            };
            steps.push(step(lane, gives, vec![to], Kind::Contribution));
        }
        if piece.sources.only == Some(rank) && piece.destinations.has(rank) {
            // This rank is both the only source and a destination: there is nothing to receive.
            let (lane, kind) = (Lane::To(rank), Kind::Contribution);
            steps.push(step(lane, Gives::Result, Vec::new(), kind));
        } else if piece.destinations.has(rank) {
            let (from, targets) = (self.distributor(chunk, rank), self.targets(chunk));
            let lane = match from == chunk.owner {
                true if !targets.is_empty() => Lane::PassOn,
                true => Lane::From(from, Kind::Result),
                false => Lane::From(from, Kind::Distributed),
            };
            steps.push(step(lane, Gives::Result, targets, Kind::Distributed));
        }
        steps
    }

    /// A step of a lane.
    fn step(
        &self,
        chunk: &Chunk,
        lane: Lane,
        gives: Gives,
        (targets, target_kind): (Vec<usize>, Kind),
    ) -> Step {
        let is_source = chunk.piece.sources.has(self.group.rank);
        let (reads_input, sources, source_kind) = match lane {
            Lane::To(_) => (true, Vec::new(), Kind::Contribution),
            Lane::Gather => (is_source, self.sources(chunk), Kind::Contribution),
            Lane::From(rank, kind) => (false, vec![self.values(chunk, rank)], kind),
            Lane::PassOn => (false, vec![self.values(chunk, chunk.owner)], Kind::Result),
        };
        let given = match gives {
            Gives::Blocks => self.blocks(chunk, self.group.rank),
            Gives::Copy | Gives::Result => self.values(chunk, self.group.rank),
        };
        Step {
            lane,
            piece: chunk.piece,
            reads_input,
            sources,
            source_kind,
            gives,
            num_bytes: given.num_bytes,
            room: None,
            targets,
            target_kind,
        }
    }

    /// What this rank, the owner or a collector, takes in.
    fn sources(&self, chunk: &Chunk) -> Vec<Source> {
        let rank = self.group.rank;
        let candidates = match chunk.piece.sources.only {
            Some(only) => vec![only],
            None => self.ranks_near(chunk),
        };
        let others = candidates.into_iter().filter(|from| *from != rank);
        let source = |from| match self.collector(chunk, from) {
            collector if collector == rank => Some(self.values(chunk, from)),
            collector if collector == from && chunk.owner == rank => Some(self.blocks(chunk, from)),
            _ => None,
        };
        others.filter_map(source).collect()
    }

    /// Who gets the result from this rank.
    fn targets(&self, chunk: &Chunk) -> Vec<usize> {
        let (rank, piece) = (self.group.rank, chunk.piece);
        if piece.destinations.only.is_some() {
            return Vec::new();
        }
        let mut targets = self.ranks_near(chunk);
        targets.retain(|to| *to != rank && piece.sources.only != Some(*to));
        targets.retain(|to| self.distributor(chunk, *to) == rank);
        targets
    }

    /// With whom this rank may have to do: as the owner with all ranks, else with those of its host.
    fn ranks_near(&self, chunk: &Chunk) -> Vec<usize> {
        let (rank, hosts) = (self.group.rank, &self.group.hosts);
        match chunk.owner == rank {
            true => (0..hosts.host_of.len()).collect(),
            false => hosts.ranks[hosts.host_of[rank]].clone(),
        }
    }

    /// The values of `rank`, or those that it passes on.
    fn values(&self, chunk: &Chunk, rank: usize) -> Source {
        Source {
            rank,
            host: None,
            num_bytes: chunk.piece.len * self.sizes.0,
        }
    }

    /// The blocks of a host, from its collector.
    fn blocks(&self, chunk: &Chunk, collector: usize) -> Source {
        let (element_bytes, widening) = self.sizes;
        let host = self.group.hosts.host_of[collector];
        let num_blocks = self.group.hosts.blocks[host].len();
        Source {
            rank: collector,
            host: Some(host),
            num_bytes: num_blocks * chunk.piece.len * element_bytes * widening,
        }
    }

    /// Who takes in the input of `rank`, a source.
    fn collector(&self, chunk: &Chunk, rank: usize) -> usize {
        let hosts = &self.group.hosts;
        let host = hosts.host_of[rank];
        // Whether the host sends fewer bytes if it reduces what it has first.
        let reduces = hosts.blocks[host].len() * self.sizes.1 < hosts.ranks[host].len();
        let speaker = self.speaker(chunk, rank);
        speaker
            .filter(|_| reduces && chunk.piece.sources.only.is_none())
            .unwrap_or(chunk.owner)
    }

    /// From whom `rank`, which wants the result and is not its only source, gets it.
    fn distributor(&self, chunk: &Chunk, rank: usize) -> usize {
        let speaker = self.speaker(chunk, rank);
        speaker
            .filter(|speaker| *speaker != rank)
            .unwrap_or(chunk.owner)
    }

    /// The rank that speaks with the owner, on another host, for those on the host of `rank`: the one whose turn it is, and which is not
    /// the only source, for this has the chunk.
    fn speaker(&self, chunk: &Chunk, rank: usize) -> Option<usize> {
        let hosts = &self.group.hosts;
        let host = hosts.host_of[rank];
        if host == hosts.host_of[chunk.owner] {
            return None;
        }
        let ranks = &hosts.ranks[host];
        let in_turn = |turn: usize| ranks[turn % ranks.len()];
        let mut speakers = [in_turn(chunk.turn), in_turn(chunk.turn + 1)].into_iter();
        speakers.find(|speaker| chunk.piece.sources.only != Some(*speaker))
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

    /// A message: its kind, sender and receiver; its chunk; its bytes.
    type Message = ((Kind, usize, usize), usize, usize);

    fn routes(
        operation: &Operation,
        shape: &Shape,
        hosts: &[usize],
        sizes: (usize, usize),
    ) -> Vec<Route> {
        let route = |rank| {
            let group = Arc::new(MpiGroup::world(rank, hosts));
            Route::new(operation, shape, group, sizes)
        };
        (0..hosts.len()).map(route).collect()
    }

    /// What all ranks send, and what all ranks receive.
    fn messages(routes: &[Route]) -> [Vec<Message>; 2] {
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        for route in routes {
            let rank = route.group.rank;
            for step in &route.steps {
                let [sources, destinations] = [step.piece.sources, step.piece.destinations];
                let place = (sources.first * 1_000_003 + destinations.first) * 1009
                    + sources.only.map_or(0, |rank| rank + 1) * 31
                    + destinations.only.map_or(0, |rank| rank + 1);
                for from in &step.sources {
                    received.push(((step.source_kind, from.rank, rank), place, from.num_bytes));
                }
                for to in &step.targets {
                    sent.push(((step.target_kind, rank, *to), place, step.num_bytes));
                }
            }
        }
        // Those with one tag between two ranks stay in their order.
        sent.sort_by_key(|message| message.0);
        received.sort_by_key(|message| message.0);
        [sent, received]
    }

    /// Bytes that each of four hosts sends to others.
    fn bytes_sent(
        operation: &Operation,
        shape: &Shape,
        hosts: &[usize],
        host_of: impl Fn(usize) -> usize,
        sizes: (usize, usize),
    ) -> [usize; 4] {
        let mut sums = [0; 4];
        let [sent, _] = messages(&routes(operation, shape, hosts, sizes));
        for ((_, from, to), _, num_bytes) in sent {
            if host_of(from) != host_of(to) {
                sums[host_of(from)] += num_bytes;
            }
        }
        sums
    }

    #[test]
    fn bytes_on_one_host_are_those_of_a_ring() {
        let (shape, size) = (Shape::from((4096, 1024)), 4096 * 1024 * 4);
        let quarters = [[6; 4], [12; 4], [3; 4], [3; 4], [2, 2, 6, 2]];
        for (operation, quarters) in OPERATIONS.iter().zip(quarters) {
            let sent = bytes_sent(operation, &shape, &[0; 4], |rank| rank, (4, 1));
            assert_eq!(sent, quarters.map(|part| size / 4 * part), "{operation}");
        }
    }

    /// As the table says.
    #[test]
    fn bytes_of_a_card() {
        let (num_hosts, r) = (4, 4);
        let hosts: Vec<usize> = (0..num_hosts * r).map(|rank| rank / r).collect();
        for (element_bytes, widening) in [(4, 1), (2, 2)] {
            let (sizes, shape) = ((element_bytes, widening), Shape::from((4096, 4096)));
            let others = 4096 * 4096 * element_bytes / num_hosts * (num_hosts - 1);
            let all_gather = num_hosts * r;
            let factors = [1 + widening, all_gather, widening, r].map(|factor| [factor; 4]);
            let factors = factors.into_iter().chain([[2, 1, 1, 1]]);
            for (operation, factors) in OPERATIONS.iter().zip(factors) {
                let sent = bytes_sent(operation, &shape, &hosts, |rank| hosts[rank], sizes);
                assert_eq!(sent, factors.map(|factor| factor * others), "{operation}");
            }
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
                    let [sent, received] = messages(&routes);
                    assert_eq!(sent, received, "{operation} on {hosts:?}");
                    for route in &routes {
                        for Step { piece, gives, .. } in &route.steps {
                            assert!(piece.len * sizes.0 <= CHUNK_BYTES && piece.len > 0);
                            let wants = piece.destinations.has(route.group.rank);
                            assert!(wants || *gives != Gives::Result);
                        }
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
                let group = Arc::new(MpiGroup::world(3, &hosts));
                for (element_bytes, widening) in [(4, 1), (2, 2)] {
                    let sum = Operation::AllReduce(ReduceOp::Sum);
                    let shape = Shape::from(64 << 20);
                    let sizes = (element_bytes, widening);
                    let route = Route::new(&sum, &shape, group.clone(), sizes);
                    let is_owned = |step: &&Step| step.target_kind == Kind::Result;
                    let step = route.steps.iter().find(is_owned).unwrap();
                    let bytes: usize = step.sources.iter().map(|source| source.num_bytes).sum();
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
            let group = Arc::new(MpiGroup::world(77, &hosts));
            let route = Route::new(operation, &shape, group, (4, 1));
            let num_steps = route.steps.len();
            assert!(num_steps < 4 * 4096, "{operation}: {num_steps}");
        }
        assert!(size_of::<Step>() <= 256);
    }
}
