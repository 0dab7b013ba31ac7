//! Why a run ended.

use serde::{Deserialize, Serialize};

/// Why a run ended before its ranks had left it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// What kind of end it is.
    pub kind: FailureKind,
    /// The rank at fault, if it is one.
    pub rank: Option<usize>,
    /// What happened, to which rank on which host, and what it did last.
    pub message: String,
}

/// The ways in which a run ends early.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureKind {
    /// A rank's process is gone, or cannot be reached.
    Died,
    /// A rank said that it failed.
    Failed,
    /// A rank was asked to end by a signal.
    Terminated,
    /// An operation lasted longer than the deadline.
    Deadline,
}
