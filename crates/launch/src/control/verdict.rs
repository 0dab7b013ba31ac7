//! What comparing calls across a group found.

use serde::{Deserialize, Serialize};

/// What [`Control::check`](super::Control::check) found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// All members of the group made the same call.
    Agree,
    /// Two members, as world ranks, and what each of them called, where.
    Differ {
        /// The lowest rank of the group.
        first: (usize, String),
        /// The lowest rank that called something else.
        second: (usize, String),
    },
    /// A member has left the run without making the call.
    Left {
        /// The member, as a world rank.
        rank: usize,
        /// The last operation of each rank of the run.
        report: String,
    },
}
