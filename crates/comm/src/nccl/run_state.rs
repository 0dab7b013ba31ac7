//! How long a rank waits in its run over NCCL, and how the run has failed.

use std::fmt::Display;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::Error;

/// What everything in a rank's run over NCCL asks.
pub(super) struct RunState {
    pub rank: usize,
    pub deadline: Duration,
    failure: Mutex<Option<Error>>,
}

impl RunState {
    pub fn new(rank: usize, deadline: Duration) -> Self {
        Self {
            rank,
            deadline,
            failure: Mutex::default(),
        }
    }

    /// How this rank's run has failed, if it has.
    pub fn failure(&self) -> Option<Error> {
        let failure = self.failure.lock();
        failure.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes how the run has failed. Only the first failure counts.
    pub fn set_failure(&self, error: Error) {
        let failure = self.failure.lock();
        failure
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert(error);
    }

    /// An error if the run has failed, for what was called after that.
    pub fn check(&self, call: &dyn Display) -> Result<(), Error> {
        match self.failure() {
            None => Ok(()),
            Some(failure) => Err(Error::Backend(format!(
                "{call} on rank {} cannot complete: the run over NCCL has failed: {failure}",
                self.rank
            ))),
        }
    }

    /// The error about something that is not complete at the deadline.
    pub fn late(&self, call: &dyn Display) -> Error {
        Error::Deadline {
            waiting: self.rank,
            call: call.to_string(),
            secs: self.deadline.as_secs_f64(),
            missing: "NCCL cannot tell who".into(),
            report: format!("  rank {}: {call}", self.rank),
        }
    }
}
