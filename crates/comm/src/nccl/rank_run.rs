//! State that the groups of a rank's run over NCCL share, and how the run fails.

use std::fmt::Display;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use candle_core::cuda_backend::cudarc::driver::CudaStream;

use super::group::NcclGroup;
use crate::Error;

type Result<T> = std::result::Result<T, Error>;

/// A rank's run: its groups and their watchers ask it for deadlines, and whether it has failed.
pub(super) struct RankRun {
    pub rank: usize,
    pub deadline: Duration,
    /// The stream on which the rank computes.
    pub compute: Arc<CudaStream>,
    state: Mutex<RunState>,
    /// Held by who aborts the groups.
    aborting: Mutex<()>,
}

#[derive(Default)]
struct RunState {
    /// How the run has failed, if it has.
    failure: Option<Error>,
    /// In the order in which they came to be; none after a failure, which has aborted them.
    groups: Vec<Arc<NcclGroup>>,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code panics while it holds one of these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RankRun {
    /// A run without groups.
    pub fn new(rank: usize, deadline: Duration, compute: Arc<CudaStream>) -> Self {
        Self {
            rank,
            deadline,
            compute,
            state: Mutex::default(),
            aborting: Mutex::default(),
        }
    }

    /// How this rank's run has failed, if it has.
    pub fn failure(&self) -> Option<Error> {
        lock(&self.state).failure.clone()
    }

    /// Ends the run: what waits on a GPU for other ranks waits no more, and what is called later fails. Only the first failure
    /// counts. When it returns, whichever thread was the first, NCCL uses no memory any more. Nobody may hold a group's lock who calls it.
    /// If NCCL hangs it does not return, since memory would be freed that NCCL may still write to: the launcher ends such a process, when
    /// the control plane has ended the others.
    pub fn fail(&self, failure: Error) {
        // Whoever holds a group's lock sees the failure, and gives it up.
        lock(&self.state).failure.get_or_insert(failure);
        let _aborting = lock(&self.aborting);
        let groups = std::mem::take(&mut lock(&self.state).groups);
        groups.iter().rev().for_each(|group| group.abort());
    }

    /// An error if the run has failed, for what was called after that.
    pub fn check(&self, call: &dyn Display) -> Result<()> {
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

    /// A group to be freed when the run ends.
    ///
    /// # Errors
    /// The failure of the run: then it is aborted as the other groups.
    pub fn add(&self, group: NcclGroup) -> Result<Arc<NcclGroup>> {
        let group = Arc::new(group);
        let mut state = lock(&self.state);
        if let Some(failure) = &state.failure {
            group.abort();
            return Err(failure.clone());
        }
        state.groups.push(group.clone());
        Ok(group)
    }

    /// Completes and frees all groups, the youngest first.
    pub fn free_groups(&self) -> Result<()> {
        let groups = {
            let state = lock(&self.state);
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            state.groups.clone()
        };
        for group in groups.iter().rev() {
            group.finalize(self)?;
        }
        for group in groups.iter().rev() {
            group.destroy()?;
        }
        lock(&self.state).groups.clear();
        Ok(())
    }
}
