//! How the work of a large collective is shared out: chunks, each with an owner that makes its result.
//!
//! The work is that of the local backend ([`Plan`]), cut. A chunk's inputs go to its owner, who adds them up in the order of the ranks, and its
//! result from there to who gets it: an all_reduce is an all-to-all of parts, a sum, and an all-gather of sums, in rounds of one chunk for each
//! owner, of which some are under way at once. Where ranks share hosts, one rank of each, in turns, speaks for its host:
//!
//! ```text
//! inputs of a host's ranks -> speaker of the host -> owner -> speaker of each other host -> its other ranks
//! ```
//! A speaker adds up what its host's ranks have if that can be done apart, with the same bits: they are an [aligned block](crate::pairwise),
//! on all hosts, and the sum, which is not rounded, has fewer bytes than they. So what all ranks want enters each host once.
//!
//! `N` ranks on `H` hosts with `r` ranks each, a power of two, in a row; `S` is the size of the input, of the output for all_gather. `w` is 1,
//! or 2 for bf16 and f16 if `r > 2`, which travel as f32 from speaker to owner. Bytes are sent; about as many are received:
//!
//! | operation | owner of a chunk | bytes per rank, one host | bytes per host's card |
//! |---|---|---|---|
//! | all_reduce | the ranks in turns | `2 (N-1)/N S` | `(1 + w) (H-1)/H S` |
//! | all_gather | who has it | `(N-1)/N S` | `(H-1)/H S` |
//! | reduce_scatter | who gets it | `(N-1)/N S` | `w (H-1)/H S` |
//! | all_to_all | who has it | `(N-1)/N S` | `r (H-1)/H S` |
//! | broadcast | the ranks in turns | root `2 (N-1)/N S`, others `(N-2)/N S` | root's `2 (H-1)/H S`, others' `(H-1)/H S` |
//!
//! Before that the ranks [meet](super::meeting): each sends `N-1` messages, `r (N-r)` of them through its host's card. With `a` and `1/b` for
//! latency and bandwidth of the card, `a'` and `1/b'` inside a host, and `o` for what MPI takes for one message, an all_reduce takes about
//!
//! ```text
//! (N-1) o + a + 2 (a + a') + (1 + w) (H-1)/H S b + 2 (r-1)/r S b'
//! ```
//! and an operation of at most [`INLINE_BYTES`](super::header::INLINE_BYTES) per rank only `(N-1) o + a + r (N-r) (S + 200 bytes) b`.

use candle_core::Shape;

use super::group::Group;
use crate::Operation;
use crate::plan::{Piece, Plan};

/// What one message holds at most: little enough to stay in a cache while it is copied and reduced.
const CHUNK_BYTES: usize = 512 << 10;

/// What the messages of one operation that are under way hold at most, on one rank.
const WINDOW_BYTES: usize = 32 << 20;

/// Rounds under way at once.
pub(super) const NUM_ROUNDS: usize = 3;

/// A piece of the work with the rank that makes its result.
#[derive(Debug)]
pub(super) struct Chunk {
    pub piece: Piece,
    pub owner: usize,
    /// There is one of each round and owner, but for an all-to-all.
    pub round: usize,
    /// Whether speakers add up what their hosts' ranks have.
    adds_on_hosts: bool,
}

/// What a rank does for a chunk, with which others.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Whether it takes in inputs, its own among them if it has one: to send them on, or to make the result.
    pub gathers: bool,
    /// Whose inputs it takes in beside its own, or those that they have added up.
    pub inputs_from: Vec<usize>,
    /// To whom it sends what it has taken in, unless it makes the result.
    pub inputs_to: Vec<usize>,
    pub result_from: Option<usize>,
    pub result_to: Vec<usize>,
}

/// The chunks of a collective on one input of this shape for each rank, in the order that all ranks keep, as far as this rank of the group takes
/// part in them. An element has so many bytes, and so many times as many where values are accumulated.
pub(super) fn chunks(
    operation: &Operation,
    shape: &Shape,
    group: &Group,
    (element_bytes, widening): (usize, usize),
) -> Vec<Chunk> {
    let (world_size, hosts) = (group.members.len(), &group.hosts);
    // In each round a rank may receive an input from each other one, and as many for its host, send one to each, and receive the results.
    let messages = 4 * NUM_ROUNDS * world_size;
    let chunk_bytes = CHUNK_BYTES.min(WINDOW_BYTES / messages).max(4096);
    let longest = in_lines(chunk_bytes / element_bytes.max(1));
    let in_turns = matches!(
        operation,
        Operation::AllReduce(_) | Operation::Broadcast { .. }
    );
    let mut chunks = Vec::new();
    for piece in Plan::new(operation, shape, world_size, Some(group.rank)).pieces {
        let owner = piece.sources.only.or(piece.destinations.only);
        let longest = match in_turns {
            // Everybody gets as many turns.
            true => {
                let len = piece.len.div_ceil(world_size);
                in_lines(len.div_ceil(len.div_ceil(longest)))
            }
            false => longest,
        };
        let parts = piece.cut(longest).enumerate();
        chunks.extend(parts.map(|(index, piece)| {
            let (owner, round) = match in_turns {
                true => (index % world_size, index / world_size),
                false => (owner.unwrap_or(0), index),
            };
            Chunk {
                piece,
                owner,
                round,
                adds_on_hosts: hosts.are_blocks && hosts.most_ranks > widening,
            }
        }));
    }
    // So that all hosts' cards are busy all the time.
    chunks.sort_by_key(|chunk| chunk.round);
    chunks.retain(|chunk| {
        let Piece {
            sources,
            destinations,
            ..
        } = chunk.piece;
        let rank = group.rank;
        chunk.owner == rank || sources.has(rank) || destinations.has(rank)
    });
    chunks
}

/// So many elements, in whole cache lines.
fn in_lines(len: usize) -> usize {
    len.next_multiple_of(64)
}

impl Chunk {
    /// What this rank of the group does for it.
    pub fn part(&self, group: &Group) -> Part {
        let (rank, owner, hosts) = (group.rank, self.owner, &group.hosts);
        let has_input = self.piece.sources.has(rank);
        // With whom it may have to do: the owner with all ranks, another one with those of its host.
        let near = match owner == rank {
            true => &(0..group.members.len()).collect(),
            false => &hosts.ranks[hosts.host_of[rank]],
        };
        let others = near
            .iter()
            .copied()
            .filter(|other| *other != rank && *other != owner);
        let inputs_from = others.clone().filter(|other| {
            self.piece.sources.has(*other) && self.inputs_to(group, *other) == rank
        });
        let result_to =
            others.filter(|other| self.wants(*other) && self.result_from(group, *other) == rank);
        let inputs_to = (has_input && owner != rank).then(|| self.inputs_to(group, rank));
        Part {
            gathers: owner == rank || has_input,
            inputs_from: inputs_from.collect(),
            inputs_to: inputs_to.into_iter().collect(),
            result_from: (self.wants(rank) && owner != rank).then(|| self.result_from(group, rank)),
            result_to: result_to.collect(),
        }
    }

    /// Whether what `rank` has taken in, itself or from its host's ranks, is the result.
    pub fn has_result(&self, rank: usize) -> bool {
        rank == self.owner || self.piece.sources.only == Some(rank)
    }

    /// Whether `rank` is to be sent the result, unless it is the owner.
    fn wants(&self, rank: usize) -> bool {
        self.piece.destinations.has(rank) && !self.has_result(rank)
    }

    /// Whether `rank`, not the owner, takes in what its host's ranks have.
    pub fn adds_up_host(&self, group: &Group, rank: usize) -> bool {
        let hosts = &group.hosts;
        hosts.ranks[hosts.host_of[rank]].len() > 1
            && self.adds_on_hosts
            && self.piece.sources.only.is_none()
            && self.speaker(group, rank) == Some(rank)
    }

    /// To whom `rank`, not the owner, sends what it has taken in.
    fn inputs_to(&self, group: &Group, rank: usize) -> usize {
        let speaker = self.speaker(group, rank).filter(|speaker| {
            self.adds_on_hosts && self.piece.sources.only.is_none() && *speaker != rank
        });
        speaker.unwrap_or(self.owner)
    }

    /// From whom `rank`, not the owner, gets the result.
    fn result_from(&self, group: &Group, rank: usize) -> usize {
        let speaker = self
            .speaker(group, rank)
            .filter(|speaker| self.piece.destinations.only.is_none() && *speaker != rank);
        speaker.unwrap_or(self.owner)
    }

    /// The rank that speaks with the owner, on another host, for those on the host of `rank`: the one whose turn it is, and which is not the
    /// only source, for this has the result.
    fn speaker(&self, group: &Group, rank: usize) -> Option<usize> {
        let (hosts, turn) = (&group.hosts, self.owner + self.round);
        let host = hosts.host_of[rank];
        if host == hosts.host_of[self.owner] {
            return None;
        }
        let ranks = &hosts.ranks[host];
        let mut in_turn = [turn, turn + 1]
            .map(|turn| ranks[turn % ranks.len()])
            .into_iter();
        in_turn.find(|speaker| self.piece.sources.only != Some(*speaker))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ReduceOp;
    use crate::mpi::group::Kind;

    const OPERATIONS: [Operation; 5] = [
        Operation::AllReduce(ReduceOp::Sum),
        Operation::AllGather,
        Operation::ReduceScatter(ReduceOp::Max),
        Operation::AllToAll,
        Operation::Broadcast { root: 2 },
    ];

    /// Which 4 and 16 ranks have in rounds of equal chunks.
    const LEN: usize = 16 * 64 * 1800;

    /// A message: its kind, sender and receiver, the place of its chunk in inputs and outputs, and its bytes.
    type Message = ((Kind, usize, usize), [usize; 2], usize);

    /// What all ranks send, and what all ranks receive, each in its order.
    fn messages(
        operation: &Operation,
        shape: &Shape,
        host_of: &[usize],
        sizes: (usize, usize),
    ) -> [Vec<Message>; 2] {
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        for rank in 0..host_of.len() {
            let group = Group::world(rank, host_of);
            for chunk in chunks(operation, shape, &group, sizes) {
                assert!(chunk.piece.len > 0 && chunk.piece.len * sizes.0 <= CHUNK_BYTES);
                let part = chunk.part(&group);
                let bytes_of = |rank| match rank != chunk.owner && chunk.adds_up_host(&group, rank)
                {
                    true => chunk.piece.len * sizes.0 * sizes.1,
                    false => chunk.piece.len * sizes.0,
                };
                let places = [chunk.piece.sources.first, chunk.piece.destinations.first];
                let whole = chunk.piece.len * sizes.0;
                let of_result = |from| Kind::of_result(from == chunk.owner);
                let inputs_from = part.inputs_from.iter();
                received.extend(
                    inputs_from.map(|from| ((Kind::Input, *from, rank), places, bytes_of(*from))),
                );
                let inputs_to = part.inputs_to.iter();
                sent.extend(inputs_to.map(|to| ((Kind::Input, rank, *to), places, bytes_of(rank))));
                let result_from = part.result_from.iter();
                received.extend(
                    result_from.map(|from| ((of_result(*from), *from, rank), places, whole)),
                );
                let result_to = part.result_to.iter();
                sent.extend(result_to.map(|to| ((of_result(rank), rank, *to), places, whole)));
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
        host_of: &[usize],
        machine_of: &[usize],
        sizes: (usize, usize),
    ) -> [usize; 4] {
        let mut sums = [0; 4];
        let [sent, _] = messages(operation, &Shape::from(LEN), host_of, sizes);
        for ((_, from, to), _, num_bytes) in sent {
            if machine_of[from] != machine_of[to] {
                sums[machine_of[from]] += num_bytes;
            }
        }
        sums
    }

    #[test]
    fn bytes_on_one_host_are_those_of_a_ring() {
        let quarters = [[6; 4], [12; 4], [3; 4], [3; 4], [2, 2, 6, 2]];
        for (operation, quarters) in OPERATIONS.iter().zip(quarters) {
            let sent = bytes_sent(operation, &[0; 4], &[0, 1, 2, 3], (4, 1));
            assert_eq!(sent, quarters.map(|part| LEN * part), "{operation}");
        }
    }

    /// As the table says.
    #[test]
    fn bytes_of_a_card() {
        let (num_hosts, r) = (4, 4);
        let hosts: Vec<usize> = (0..num_hosts * r).map(|rank| rank / r).collect();
        for (element_bytes, widening) in [(4, 1), (2, 2)] {
            let others = LEN * element_bytes / num_hosts * (num_hosts - 1);
            let all_gather = num_hosts * r;
            let factors = [1 + widening, all_gather, widening, r].map(|factor| [factor; 4]);
            let factors = factors.into_iter().chain([[2, 1, 1, 1]]);
            for (operation, factors) in OPERATIONS.iter().zip(factors) {
                let sent = bytes_sent(operation, &hosts, &hosts, (element_bytes, widening));
                assert_eq!(sent, factors.map(|factor| factor * others), "{operation}");
            }
        }
    }

    /// Each message that one rank sends another one receives, in the same order, whatever the layout.
    #[test]
    fn ranks_agree_on_the_messages() {
        let layouts: [&[usize]; 8] = [
            &[0, 0, 0],
            &[0, 1, 2],
            &[0, 0, 1, 1, 2],
            &[0, 0, 0, 0, 1, 1, 1],
            &[0, 0, 0, 1, 1, 1, 2],
            &[0, 1, 0, 1, 0, 1],
            &[0, 0, 0, 0, 1, 1, 1, 2, 2],
            &[2, 2, 2, 2, 0, 2, 1, 1],
        ];
        for hosts in layouts {
            for operation in &OPERATIONS {
                for sizes in [(4, 1), (2, 2)] {
                    let shape = Shape::from((hosts.len() * 7, 30_011));
                    let [sent, received] = messages(operation, &shape, hosts, sizes);
                    assert!(!sent.is_empty());
                    assert_eq!(sent, received, "{operation} on {hosts:?}");
                }
            }
        }
    }

    /// However many ranks there are, and however they lie on hosts.
    #[test]
    fn rounds_fit_the_window() {
        for (num_hosts, r) in [(64, 8), (64, 6), (512, 1), (1, 512)] {
            for cyclic in [false, true] {
                let host_of = |rank: usize| if cyclic { rank % num_hosts } else { rank / r };
                let hosts: Vec<usize> = (0..num_hosts * r).map(host_of).collect();
                let group = Group::world(3, &hosts);
                for sizes in [(4, 1), (2, 2)] {
                    let sum = Operation::AllReduce(ReduceOp::Sum);
                    let chunks = chunks(&sum, &Shape::from(64 << 20), &group, sizes);
                    let first = chunks.iter().take_while(|chunk| chunk.round < NUM_ROUNDS);
                    let bytes = first.map(|chunk| {
                        let part = chunk.part(&group);
                        let sent = usize::from(part.gathers);
                        let messages =
                            part.inputs_from.len() + sent + part.result_from.iter().len();
                        chunk.piece.len * sizes.0 * messages
                    });
                    let bytes: usize = bytes.sum();
                    assert!(bytes <= WINDOW_BYTES, "{num_hosts} x {r}: {bytes}");
                }
            }
        }
    }
}
