//! Why a run ended, and how ranks are seen to die, in words that both ends of a connection use.

use std::io;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Why a run ended before its ranks had left it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// What kind of end it is.
    pub kind: FailureKind,
    /// The rank at fault, if it is one: none if all failed by themselves, with the same words.
    pub rank: Option<usize>,
    /// What happened, to which rank on which host, and what it did last.
    pub message: String,
}

impl Failure {
    /// Whether all ranks failed by themselves, with the same words: then it is enough if rank 0 shows them.
    pub fn is_of_all(&self) -> bool {
        self.kind == FailureKind::Failed && self.rank.is_none()
    }
}

/// The ways in which a run ends early.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureKind {
    /// A rank's process is gone, or cannot be reached.
    Died,
    /// A rank said that it failed, or all did.
    Failed,
    /// A rank was asked to end by a signal.
    Terminated,
    /// An operation lasted longer than the deadline.
    Deadline,
}

/// What happened to a rank whose connection cannot be read any more.
pub(super) fn died(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::InvalidData => format!("died: it sent what is no message ({error})"),
        _ => "died: its connection closed without a goodbye".to_string(),
    }
}

/// What happened to a rank that says nothing.
pub(super) fn silent(silence: Duration) -> String {
    format!("has not been heard of for {:.0} s", silence.as_secs_f64())
}

pub(super) const DIED_HINT: &str = "hint: see what this rank itself printed; a process that was killed prints nothing (the \
    kernel's log, `dmesg`, tells if its host was out of memory)";

pub(super) const SILENT_HINT: &str =
    "hint: its process is stopped, its host is down or the network between the hosts is cut";
