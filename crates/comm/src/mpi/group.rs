//! A group of ranks, and where its messages go: all groups share one communicator of MPI, and have tags of their own.
//!
//! Each rank numbers the groups that it is in, and a message has a tag of the group's number at its receiver, which ranks tell each
//! other when they split. So a rank never gets messages of two groups with one tag, no number has to be agreed on, and a new group
//! takes no call to MPI: nothing that could wait for a rank that does not come.

use std::ffi::c_int;

use super::Result;
use super::context::Shared;
use super::hosts::Hosts;
use super::native::NativeGroup;
use super::tags::TAGS_PER_GROUP;
use crate::Error;
use crate::error::group_name;

/// A group that this rank is in.
pub(super) struct Group {
    /// Its number at this rank; that of the world is 0.
    pub number: usize,
    /// This rank in it.
    pub rank: usize,
    /// The world ranks, by group rank.
    pub members: Vec<usize>,
    /// Its number at each member.
    numbers: Vec<c_int>,
    pub hosts: Hosts,
    /// Where MPI adds by itself.
    pub native: Option<NativeGroup>,
}

impl Group {
    /// The world, whose ranks lie on these hosts.
    pub fn world(rank: usize, host_of: &[usize], native: Option<NativeGroup>) -> Self {
        Self {
            number: 0,
            rank,
            members: (0..host_of.len()).collect(),
            numbers: vec![0; host_of.len()],
            hosts: Hosts::new(host_of),
            native,
        }
    }

    /// The group of these ranks of this one, which has these numbers at its members. Nothing is said to the others, unless MPI adds.
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
        // Each new group is named by its lowest rank.
        let color = members.iter().min().copied().unwrap_or(0);
        let native = self
            .native
            .map(|all| all.split(color, rank, shared.deadline));
        let host_of: Vec<usize> = (ranks.iter().map(|rank| self.hosts.host_of[*rank])).collect();
        Ok(Self {
            number: numbers[rank] as usize,
            rank,
            members,
            numbers: numbers.iter().map(|number| *number as c_int).collect(),
            hosts: Hosts::new(&host_of),
            native: native.transpose()?,
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
        let world = Group::world(2, &[0; 8], None);
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
}
