//! What ranks and rank 0's server say to each other.

use serde::{Deserialize, Serialize};

use super::activity::Snapshot;
use super::{ControlConfig, Failure, FailureKind, RankGroup};

/// What a rank says of itself when it comes. Versions may add fields, never change these.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Hello {
    pub rank: usize,
    pub world_size: usize,
    pub host: String,
    pub pid: u32,
    pub fingerprint: Vec<(String, String)>,
    /// Why it cannot start, if so.
    #[serde(default)]
    pub cannot_start: Option<String>,
}

impl Hello {
    pub(super) fn new(config: &ControlConfig) -> Self {
        Self {
            rank: config.rank,
            world_size: config.world_size,
            host: config.host.clone(),
            pid: std::process::id(),
            fingerprint: config.fingerprint.clone(),
            cannot_start: config.cannot_start.clone(),
        }
    }

    /// Whether a process that says `other` is this one, come again.
    pub(super) fn is_of_same_process(&self, other: &Hello) -> bool {
        (&self.host, self.pid) == (&other.host, other.pid)
    }

    /// "rank 2 on host b (process 4711)".
    pub(super) fn name(&self) -> String {
        format!(
            "rank {} on host {} (process {})",
            self.rank, self.host, self.pid
        )
    }

    /// In what the fingerprint of `other` differs from this one, rank 0's, in the order of this one.
    pub(super) fn differences(&self, other: &Hello) -> Vec<String> {
        let value = |hello: &Hello, name: &str| {
            let found = hello.fingerprint.iter().find(|(other, _)| other == name);
            found.map_or_else(|| "not given".to_string(), |(_, value)| value.clone())
        };
        let mut differences = Vec::new();
        for (name, _) in self.fingerprint.iter().chain(&other.fingerprint) {
            let (got, expected) = (value(other, name), value(self, name));
            let difference = format!("{name} is {got}, expected {expected} as on rank 0");
            if got != expected && !differences.contains(&difference) {
                differences.push(difference);
            }
        }
        differences
    }
}

/// From a rank to the server, after its `Hello`.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromRank {
    /// "I am alive", and doing this.
    Beat(Snapshot),
    /// "I am in this group": what `Beat` says of it is by its id.
    Group(RankGroup),
    /// A question; the rank waits for the answer with this id. The body belongs to it.
    Ask { id: u64, question: Question },
    /// "I have failed", or been told to end.
    Failed { kind: FailureKind, message: String },
    /// "I know of the failure."
    Noted,
    /// "I am done, and need nothing more."
    Leave,
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
    /// The rank is not let in. `all`: nobody is, the run does not start.
    Refused { message: String, all: bool },
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
    /// To a check; to a gather only that a rank has left.
    Verdict(Verdict),
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
