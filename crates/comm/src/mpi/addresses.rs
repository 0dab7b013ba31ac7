//! Where the messages of a group go: all groups share one communicator of MPI, and have tags of their own.
//!
//! Each rank numbers the groups that it is in, and a message has a tag of the group's number at its receiver, which ranks tell each
//! other when they split. So a rank never gets messages of two groups with one tag, no number has to be agreed on, and a new group
//! takes no call to MPI: nothing that could wait for a rank that does not come.

use std::ffi::c_int;
use std::sync::Arc;

use super::tags::TAGS_PER_GROUP;
use crate::Error;

/// A group's number at this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Comm(pub usize);

/// The ranks of a group, by group rank.
#[derive(Debug, Clone)]
pub(super) struct Addresses {
    /// The world ranks.
    pub members: Arc<[usize]>,
    /// The group's number at each.
    numbers: Vec<c_int>,
}

impl Addresses {
    /// The world, which is number 0 at all ranks.
    pub fn world(world_size: usize) -> Self {
        Self {
            members: (0..world_size).collect(),
            numbers: vec![0; world_size],
        }
    }

    /// A group that has these numbers at its members; tags go up to `max_tag`.
    ///
    /// # Errors
    /// A rank is in more groups than there are tags for: the same error on all ranks of the group.
    pub fn new(members: Arc<[usize]>, numbers: &[i64], max_tag: c_int) -> Result<Self, Error> {
        let num_groups = i64::from(max_tag / TAGS_PER_GROUP);
        let too_many = (members.iter().zip(numbers)).find(|(_, number)| **number >= num_groups);
        if let Some((rank, number)) = too_many {
            return Err(Error::Argument(format!(
                "split: rank {rank} is in {number} groups already, and this MPI has tags for {num_groups} (MPI_TAG_UB is {max_tag})\n\
                 hint: make groups once, and keep them"
            )));
        }
        let numbers = numbers.iter().map(|number| *number as c_int).collect();
        Ok(Self { members, numbers })
    }

    /// The world's rank of a member, and the tag of messages that it receives with `tag` of this group.
    pub fn of(&self, member: usize, tag: c_int) -> (c_int, c_int) {
        let tag = self.numbers[member] * TAGS_PER_GROUP + tag;
        (self.members[member] as c_int, tag)
    }

    /// The member that is this rank of the world.
    pub fn member(&self, world_rank: c_int) -> Option<usize> {
        let ranks = &mut self.members.iter();
        ranks.position(|rank| *rank as c_int == world_rank)
    }
}

/// The tag with which this rank receives.
pub(super) fn own_tag(comm: Comm, tag: c_int) -> c_int {
    comm.0 as c_int * TAGS_PER_GROUP + tag
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_those_of_the_receiver() {
        let members: Arc<[usize]> = Arc::new([7, 2]);
        let group = Addresses::new(members.clone(), &[3, 5], c_int::MAX).unwrap();
        assert_eq!(group.of(1, 9), (2, own_tag(Comm(5), 9)));
        assert_eq!(group.of(0, 9), (7, own_tag(Comm(3), 9)));
        assert_eq!((group.member(2), group.member(0)), (Some(1), None));
        // The least that MPI allows.
        let few = i64::from(32767 / TAGS_PER_GROUP);
        assert!(Addresses::new(members.clone(), &[few - 1, 1], 32767).is_ok());
        let error = Addresses::new(members, &[1, few], 32767).unwrap_err();
        let said = format!("rank 2 is in {few} groups already");
        assert!(error.to_string().contains(&said), "{error}");
    }
}
