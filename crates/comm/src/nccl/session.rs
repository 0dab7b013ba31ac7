//! What the groups of a rank share: the watcher, and how the run ends.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use candle_core::cuda_backend::cudarc::driver::CudaStream;

use super::group::Group;
use super::run_state::RunState;
use super::watcher::{self, UnderWay};
use crate::Error;

type Result<T> = std::result::Result<T, Error>;

/// What the groups of a rank share.
///
/// Its end ends the run over NCCL: groups are completed and freed, the youngest first; after a failure, or in a panic, aborted.
pub(super) struct Session {
    pub state: Arc<RunState>,
    /// The stream on which the rank computes.
    pub compute: Arc<CudaStream>,
    /// In the order in which they came to be.
    groups: Mutex<Vec<Arc<Group>>>,
    watcher: Mutex<Option<(Sender<UnderWay>, JoinHandle<()>)>>,
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
            state: Arc::new(RunState::new(rank, deadline)),
            compute,
            groups: Mutex::default(),
            watcher: Mutex::new(None),
        });
        let weak = Arc::downgrade(&session);
        let fail = move |failure| {
            if let Some(session) = weak.upgrade() {
                session.fail(failure);
            }
        };
        let context = session.compute.context().clone();
        *lock(&session.watcher) = Some(watcher::start(&session.state, context, fail)?);
        Ok(session)
    }

    /// A group to be freed when the run ends.
    ///
    /// # Errors
    /// The failure of the run, which has aborted the other groups: then this one is aborted too.
    pub fn add(&self, group: Group) -> Result<Arc<Group>> {
        let group = Arc::new(group);
        let mut groups = lock(&self.groups);
        // Who fails notes it first and then takes the groups, so one that comes after that sees the failure.
        if let Some(failure) = self.state.failure() {
            group.abort();
            return Err(failure);
        }
        groups.push(group.clone());
        Ok(group)
    }

    /// Hands an operation to the watcher.
    pub fn watch(&self, operation: UnderWay) {
        if let Some((watcher, _)) = &*lock(&self.watcher) {
            // The watcher ends after the session only.
            drop(watcher.send(operation));
        }
    }

    /// Ends the run: what waits on a GPU for other ranks waits no more, and what is called later fails. Only the first failure
    /// counts.
    pub fn fail(&self, failure: Error) {
        self.state.set_failure(failure);
        let groups = std::mem::take(&mut *lock(&self.groups));
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
                tracing::warn!("the watcher of rank {} has panicked", self.state.rank);
            }
        }
        closed
    }

    fn free_groups(&self) -> Result<()> {
        if let Some(failure) = self.state.failure() {
            return Err(failure);
        }
        let groups = lock(&self.groups).clone();
        for group in groups.iter().rev() {
            group.finalize(&self.state)?;
        }
        for group in groups.iter().rev() {
            group.destroy()?;
        }
        lock(&self.groups).clear();
        Ok(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.fail(Error::Backend(format!("rank {} panicked", self.state.rank)));
        }
        if self.state.failure().is_none()
            && let Err(error) = self.close()
        {
            tracing::warn!(
                "the run over NCCL did not end well on rank {}: {error}",
                self.state.rank
            );
        }
    }
}
