//! The tags of messages within a group; [`addresses`](super::addresses) makes them those of the group.
//!
//! Messages with one tag between two ranks arrive in order, so numbers may repeat: who starts an operation with a tag
//! that an older one has receives its first message after it, and moves no data before the older one has.

use std::ffi::c_int;

/// Numbers before they repeat, far more than operations of a group that move data at once.
pub(super) const NUM_SEQS: u64 = 256;

/// With five tags for each number.
pub(super) const TAGS_PER_GROUP: c_int = 5 * NUM_SEQS as c_int;

fn tag(seq: u64, kind: c_int) -> c_int {
    (seq % NUM_SEQS) as c_int * 5 + kind
}

/// The first message of operation `seq`.
pub(super) fn header(seq: u64) -> c_int {
    tag(seq, 0)
}

/// Data of operation `seq` that are yet to be reduced.
pub(super) fn contribution(seq: u64) -> c_int {
    tag(seq, 1)
}

/// Data of operation `seq` that are part of the result, from who made it.
pub(super) fn result(seq: u64) -> c_int {
    tag(seq, 2)
}

/// Data of operation `seq` that are part of the result, from who got it from another host.
pub(super) fn distributed(seq: u64) -> c_int {
    tag(seq, 3)
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
        let mut tags = vec![MESSAGE_HEAD, MESSAGE_DATA, SHUTDOWN];
        for seq in 0..NUM_SEQS {
            tags.extend([
                header(seq),
                contribution(seq),
                result(seq),
                distributed(seq),
            ]);
        }
        assert!(tags.iter().all(|tag| (0..TAGS_PER_GROUP).contains(tag)));
        let num_tags = tags.len();
        tags.sort_unstable();
        tags.dedup();
        assert_eq!(tags.len(), num_tags);
        assert_eq!(header(NUM_SEQS + 5), header(5));
    }
}
