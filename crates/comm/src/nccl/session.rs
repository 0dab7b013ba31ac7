//! What the groups of a rank share: the watcher, and how the run ends.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use candle_core::cuda_backend::cudarc::driver::CudaStream;

use super::group::Group;
use super::watcher::{self, UnderWay};
use crate::Error;

type Result<T> = std::result::Result<T, Error>;

/// What the groups of a rank share.
///
/// Its end ends the run over NCCL: groups are completed and freed, the youngest first; after a failure, or in a panic, aborted.
pub(super) struct Session {
    pub rank: usize,
    pub deadline: Duration,
    /// The stream on which the rank computes.
    pub compute: Arc<CudaStream>,
    ending: Mutex<Ending>,
    watcher: Mutex<Option<(Sender<UnderWay>, JoinHandle<()>)>>,
}

#[derive(Default)]
struct Ending {
    failure: Option<Error>,
    /// In the order in which they came to be.
    groups: Vec<Arc<Group>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code panics while it holds one of these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session {
    /// A session without groups, and its watcher.
    pub fn start(
        rank: usize,
        deadline: Duration,
        compute: Arc<CudaStream>,
    ) -> std::io::Result<Arc<Self>> {
        let session = Arc::new(Self {
            rank,
            deadline,
            compute,
            ending: Mutex::default(),
            watcher: Mutex::new(None),
        });
        *lock(&session.watcher) = Some(watcher::start(&session)?);
        Ok(session)
    }

    /// A group to be freed when the run ends.
    pub fn add(&self, group: Group) -> Arc<Group> {
        let group = Arc::new(group);
        lock(&self.ending).groups.push(group.clone());
        group
    }

    /// Hands an operation to the watcher.
    pub fn watch(&self, operation: UnderWay) {
        if let Some((watcher, _)) = &*lock(&self.watcher) {
            // The watcher ends after the session only.
            drop(watcher.send(operation));
        }
    }

    /// How this rank's run has failed, if it has.
    pub fn failure(&self) -> Option<Error> {
        lock(&self.ending).failure.clone()
    }

    /// An error if the run has failed, for what was called after that.
    pub fn check(&self, call: &dyn std::fmt::Display) -> Result<()> {
        match self.failure() {
            None => Ok(()),
            Some(failure) => Err(Error::Backend(format!(
                "{call} on rank {} cannot complete: the run over NCCL has failed: {failure}",
                self.rank
            ))),
        }
    }

    /// Ends the run: what waits on a GPU for other ranks waits no more, and what is called later fails. Only the first failure
    /// counts.
    pub fn fail(&self, failure: Error) {
        let groups = {
            let mut ending = lock(&self.ending);
            ending.failure.get_or_insert(failure);
            std::mem::take(&mut ending.groups)
        };
        groups.iter().rev().for_each(|group| group.abort());
    }

    /// Completes and frees all groups.
    ///
    /// # Errors
    /// The failure of the run, or that operations do not come to their end.
    pub fn close(&self) -> Result<()> {
        let closed = self.free_groups();
        if let Err(error) = &closed {
            self.fail(error.clone());
        }
        let watcher = lock(&self.watcher).take();
        if let Some((sender, thread)) = watcher {
            drop(sender);
            // The last owner of a session may be the watcher itself.
            if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
                tracing::warn!("the watcher of rank {} has panicked", self.rank);
            }
        }
        closed
    }

    fn free_groups(&self) -> Result<()> {
        let groups = {
            let ending = lock(&self.ending);
            match &ending.failure {
                Some(failure) => return Err(failure.clone()),
                None => ending.groups.clone(),
            }
        };
        for group in groups.iter().rev() {
            group.finalize(self)?;
        }
        for group in groups.iter().rev() {
            group.destroy()?;
        }
        lock(&self.ending).groups.clear();
        Ok(())
    }

    /// The error about something that is not complete at the deadline.
    pub fn late(&self, call: &dyn std::fmt::Display) -> Error {
        Error::Deadline {
            waiting: self.rank,
            call: call.to_string(),
            secs: self.deadline.as_secs_f64(),
            missing: "NCCL cannot tell who".into(),
            report: format!("  rank {}: {call}", self.rank),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.fail(Error::Backend(format!("rank {} panicked", self.rank)));
        }
        if self.failure().is_none()
            && let Err(error) = self.close()
        {
            tracing::warn!(
                "the run over NCCL did not end well on rank {}: {error}",
                self.rank
            );
        }
    }
}
