//! The tags of messages within a group, which [makes](super::group) them its own.
//!
//! Messages with one tag between two ranks arrive in order, so numbers may repeat: who starts an operation with a tag
//! that an older one has receives its first message after it, and moves no data before the older one has.

use std::ffi::c_int;

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

#[cfg(test)]
mod tests {
    use super::*;

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
