//! A rank's run over NCCL: what its groups share, and how it ends.

use std::fmt::Display;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use candle_core::cuda_backend::cudarc::driver::CudaStream;

use super::group::Group;
use super::watcher::{self, UnderWay};
use crate::Error;

type Result<T> = std::result::Result<T, Error>;

/// What everything in a rank's run asks.
pub(super) struct Run {
    pub rank: usize,
    pub deadline: Duration,
    /// The stream on which the rank computes.
    pub compute: Arc<CudaStream>,
    state: Mutex<SessionState>,
    /// Held by who aborts the groups.
    aborting: Mutex<()>,
}

#[derive(Default)]
struct SessionState {
    /// How the run has failed, if it has.
    failure: Option<Error>,
    /// In the order in which they came to be; none after a failure, which has aborted them.
    groups: Vec<Arc<Group>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code panics while it holds one of these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Run {
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
    pub fn add(&self, group: Group) -> Result<Arc<Group>> {
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
    fn free_groups(&self) -> Result<()> {
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

/// A run with its watcher. Its end ends the run: groups are completed and freed; after a failure, or in a panic, aborted.
pub(super) struct Session {
    pub run: Arc<Run>,
    watcher: Mutex<Option<(Sender<UnderWay>, JoinHandle<()>)>>,
}

impl Session {
    /// A run without groups.
    pub fn start(
        rank: usize,
        deadline: Duration,
        compute: Arc<CudaStream>,
    ) -> std::io::Result<Self> {
        let run = Arc::new(Run {
            rank,
            deadline,
            compute,
            state: Mutex::default(),
            aborting: Mutex::default(),
        });
        let watcher = Mutex::new(Some(watcher::start(run.clone())?));
        Ok(Self { run, watcher })
    }

    /// Hands an operation to the watcher.
    pub fn watch(&self, operation: UnderWay) {
        if let Some((watcher, _)) = &*lock(&self.watcher) {
            // The watcher ends after the session only.
            drop(watcher.send(operation));
        }
    }

    /// Completes and frees all groups.
    ///
    /// # Errors
    /// The failure of the run, or that operations do not come to their end.
    pub fn close(&self) -> Result<()> {
        let closed = self.run.free_groups();
        if let Err(error) = &closed {
            self.run.fail(error.clone());
        }
        let watcher = lock(&self.watcher).take();
        if let Some((sender, thread)) = watcher {
            drop(sender);
            if thread.join().is_err() {
                tracing::warn!("the watcher of rank {} has panicked", self.run.rank);
            }
        }
        closed
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let rank = self.run.rank;
        if std::thread::panicking() {
            self.run
                .fail(Error::Backend(format!("rank {rank} panicked")));
        }
        if self.run.failure().is_none()
            && let Err(error) = self.close()
        {
            tracing::warn!("the run over NCCL did not end well on rank {rank}: {error}");
        }
    }
}
