//! The tags of messages. Each group has a communicator of its own, so tags tell apart what is within a group only.
//!
//! Messages with one tag between two ranks arrive in order, so numbers may repeat: who starts an operation with a tag
//! that an older one has receives after it.

use std::ffi::c_int;

/// Numbers before they repeat: with five tags each they stay within 32767, the least that MPI allows.
const NUM_SEQS: u64 = 6500;

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
        assert!(tags.iter().all(|tag| (0..=32767).contains(tag)));
        let num_tags = tags.len();
        tags.sort_unstable();
        tags.dedup();
        assert_eq!(tags.len(), num_tags);
        assert_eq!(header(NUM_SEQS + 5), header(5));
    }
}
