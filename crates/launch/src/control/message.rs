//! What ranks and rank 0's server say to each other.

use serde::{Deserialize, Serialize};

use super::activity::Snapshot;
use super::{Failure, FailureKind, RankGroup};

/// From a rank to the server, after its `Hello`.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromRank {
    /// "I am alive", and doing this.
    Beat(Snapshot),
    /// "I am in this group": what `Beat` and `Late` say of it is by its id.
    Group(RankGroup),
    /// A question; the rank waits for the answer with this id. The body belongs to it.
    Ask { id: u64, question: Question },
    /// "I have failed", or been told to end.
    Failed {
        kind: FailureKind,
        message: String,
        snapshot: Snapshot,
    },
    /// "I am blocked for longer than the deadline."
    Late {
        secs: f64,
        group: RankGroup,
        seq: Option<u64>,
        snapshot: Snapshot,
    },
    /// "I know of the failure."
    Noted,
    /// "I am done, and need nothing more."
    Leave(Snapshot),
}

/// What a rank wants of the others.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Question {
    /// The bodies of all ranks that ask with this key.
    Gather { key: String },
    /// Do all members of the group make the same call?
    Check {
        group: RankGroup,
        seq: u64,
        call: String,
        site: String,
    },
}

/// From the server to a rank.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToRank {
    /// The rank is in, but these are not yet.
    Waiting { missing: Vec<usize> },
    /// All ranks are there; the host of rank 0.
    Welcome { host: String },
    /// The rank is not let in. `retry`: it may be another run's server, about to end; `all`: nobody is, the run does not start.
    Refused {
        message: String,
        retry: bool,
        #[serde(default)]
        all: bool,
    },
    /// "I am alive", and rank 0 is doing this.
    Beat(Snapshot),
    /// To the question with this id. The body belongs to it.
    Answer { id: u64, answer: Answer },
    /// The run ends.
    Failed(Failure),
    /// All are done; rank 0 is told last.
    Goodbye,
}

/// The answer to a question.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Answer {
    /// The body is all ranks' bytes one after the other, of these lengths.
    Gathered { lens: Vec<usize> },
    /// To a check.
    Verdict(Verdict),
    /// This rank has left the run, so there will be no answer.
    Left { rank: usize },
}

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
