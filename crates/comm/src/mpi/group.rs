//! A group of ranks, and where its messages go: all groups share one communicator of MPI, and have tags of their own.
//!
//! Each rank numbers the groups that it is in, and a message has a tag of the group's number at its receiver, which ranks tell each
//! other when they split. So a rank never gets messages of two groups with one tag, no number has to be agreed on, and a new group
//! takes no call to MPI: nothing that could wait for a rank that does not come.
//!
//! Messages with one tag between two ranks arrive in order, so numbers may repeat: who starts an operation with a tag
//! that an older one has receives its first message after it, and moves no data before the older one has.

use std::ffi::c_int;
use std::ops::Range;

use super::Result;
use super::context::Shared;
use crate::Error;
use crate::error::group_name;
use crate::reduction::pairwise;

/// Numbers before they repeat, far more than operations of a group that move data at once.
pub(super) const NUM_SEQS: u64 = 256;

/// With five tags for each number.
pub(super) const TAGS_PER_GROUP: c_int = 5 * NUM_SEQS as c_int;

/// What a message of a collective is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// The first message.
    Header,
    /// Data that are yet to be reduced.
    Contribution,
    /// Data that are part of the result, from who made it.
    Result,
    /// Data that are part of the result, from who got it from another host.
    Distributed,
}

/// The tag of messages of operation `seq`.
pub(super) fn tag(seq: u64, kind: Kind) -> c_int {
    (seq % NUM_SEQS) as c_int * 5 + kind as c_int
}

/// What a message is, and its data if they are few.
pub(super) const MESSAGE_HEAD: c_int = 4;

/// The data of a message.
pub(super) const MESSAGE_DATA: c_int = 9;

/// In the world's group: the sender has returned.
pub(super) const SHUTDOWN: c_int = 14;

/// Which of a group's ranks share a host, and with it its network card.
#[derive(Debug)]
pub(super) struct Hosts {
    /// By group rank, from 0.
    pub host_of: Vec<usize>,
    /// By host; they ascend.
    pub ranks: Vec<Vec<usize>>,
    /// By host: the blocks of ranks that it can combine by itself.
    pub blocks: Vec<Vec<Range<usize>>>,
}

impl Hosts {
    /// The hosts of ranks of which each says the same number as the others on its host.
    pub fn new(said: &[usize]) -> Self {
        let mut numbers = said.to_vec();
        numbers.sort_unstable();
        numbers.dedup();
        let mut ranks = vec![Vec::new(); numbers.len()];
        let mut host_of = Vec::with_capacity(said.len());
        for (rank, number) in said.iter().enumerate() {
            let host = numbers.partition_point(|known| known < number);
            ranks[host].push(rank);
            host_of.push(host);
        }
        let blocks = ranks.iter();
        let blocks = blocks.map(|ranks: &Vec<usize>| pairwise::blocks(ranks, said.len()));
        Self {
            blocks: blocks.collect(),
            host_of,
            ranks,
        }
    }
}

/// A group that this rank is in.
pub(super) struct MpiGroup {
    /// Its number at this rank; that of the world is 0.
    pub number: usize,
    /// This rank in it.
    pub rank: usize,
    /// The world ranks, by group rank.
    pub members: Vec<usize>,
    /// Its number at each member.
    numbers: Vec<c_int>,
    pub hosts: Hosts,
}

impl MpiGroup {
    /// The world, whose ranks lie on these hosts.
    pub fn world(rank: usize, host_of: &[usize]) -> Self {
        Self {
            number: 0,
            rank,
            members: (0..host_of.len()).collect(),
            numbers: vec![0; host_of.len()],
            hosts: Hosts::new(host_of),
        }
    }

    /// The group of these ranks of this one, which has these numbers at its members. Nothing is said to the others.
    ///
    /// # Errors
    /// A rank is in more groups than there are tags for: the same error on all ranks of the group.
    pub fn part(&self, ranks: &[usize], numbers: &[i64], shared: &Shared) -> Result<Self> {
        let members: Vec<usize> = ranks.iter().map(|rank| self.members[*rank]).collect();
        check_numbers(&members, numbers, shared.max_tag)?;
        let Some(rank) = ranks.iter().position(|rank| *rank == self.rank) else {
            let message = format!("split: this rank is not in its own group {ranks:?}");
            return Err(Error::Backend(message));
        };
        let host_of: Vec<usize> = (ranks.iter().map(|rank| self.hosts.host_of[*rank])).collect();
        Ok(Self {
            number: numbers[rank] as usize,
            rank,
            members,
            numbers: numbers.iter().map(|number| *number as c_int).collect(),
            hosts: Hosts::new(&host_of),
        })
    }

    /// Its name in messages.
    pub fn name(&self) -> String {
        group_name(&self.members)
    }

    /// The group ranks of the others, from the next one on.
    pub fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, world_size) = (self.rank, self.members.len());
        (1..world_size).map(move |step| (rank + step) % world_size)
    }

    /// The world's rank of a member, and the tag of messages that it receives with `tag` of this group.
    pub fn address(&self, member: usize, tag: c_int) -> (c_int, c_int) {
        let tag = self.numbers[member] * TAGS_PER_GROUP + tag;
        (self.members[member] as c_int, tag)
    }

    /// The tag with which this rank receives.
    pub fn own_tag(&self, tag: c_int) -> c_int {
        self.number as c_int * TAGS_PER_GROUP + tag
    }
}

/// An error unless there are tags, up to `max_tag`, for a group that has these numbers at its members.
fn check_numbers(members: &[usize], numbers: &[i64], max_tag: c_int) -> Result<()> {
    let num_groups = i64::from(max_tag / TAGS_PER_GROUP);
    let too_many = (members.iter().zip(numbers)).find(|(_, number)| **number >= num_groups);
    let Some((rank, number)) = too_many else {
        return Ok(());
    };
    Err(Error::Argument(format!(
        "split: rank {rank} is in {number} groups already, and this MPI has tags for {num_groups} (MPI_TAG_UB is {max_tag})\n\
         hint: make groups once, and keep them"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn tags_are_those_of_the_receiver() {
        let world = MpiGroup::world(2, &[0; 8]);
        // The least that MPI allows.
        let shared = Shared::new((2, 8), Duration::ZERO, 32767);
        let part = |numbers: [i64; 2]| world.part(&[7, 2], &numbers, &shared);
        let group = part([3, 5]).unwrap();
        assert_eq!(
            (group.rank, group.number, &group.members[..]),
            (1, 5, &[7, 2][..])
        );
        assert_eq!(group.address(1, 9), (2, group.own_tag(9)));
        assert_eq!(group.address(0, 9), (7, 3 * TAGS_PER_GROUP + 9));
        let few = i64::from(32767 / TAGS_PER_GROUP);
        assert!(part([few - 1, 1]).is_ok());
        let error = part([1, few]).map(|_| ()).unwrap_err();
        let said = format!("rank 2 is in {few} groups already");
        assert!(error.to_string().contains(&said), "{error}");
    }

    #[test]
    fn ranks_are_found_by_their_hosts() {
        let hosts = Hosts::new(&[7, 7, 3, 7, 3]);
        assert_eq!(hosts.host_of, [1, 1, 0, 1, 0]);
        assert_eq!(hosts.ranks, [vec![2, 4], vec![0, 1, 3]]);
        assert_eq!(hosts.blocks, [vec![2..3, 4..5], vec![0..2, 3..4]]);
    }

    #[test]
    fn all_tags_differ_and_are_allowed() {
        let kinds = [
            Kind::Header,
            Kind::Contribution,
            Kind::Result,
            Kind::Distributed,
        ];
        let mut tags = vec![MESSAGE_HEAD, MESSAGE_DATA, SHUTDOWN];
        tags.extend((0..NUM_SEQS).flat_map(|seq| kinds.map(|kind| tag(seq, kind))));
        assert!(tags.iter().all(|tag| (0..TAGS_PER_GROUP).contains(tag)));
        let num_tags = tags.len();
        tags.sort_unstable();
        tags.dedup();
        assert_eq!(tags.len(), num_tags);
        assert_eq!(tag(NUM_SEQS + 5, Kind::Header), tag(5, Kind::Header));
    }
}
