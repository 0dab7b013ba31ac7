//! A rank's run over NCCL with its watcher, from its start to its end.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use candle_core::cuda_backend::cudarc::driver::CudaStream;

use super::rank_run::{RankRun, lock};
use super::watcher::{self, WatchedOperation};
use crate::Error;

type Result<T> = std::result::Result<T, Error>;

/// A run with its watcher. Its end ends the run: groups are completed and freed; after a failure, or in a panic, aborted.
pub(super) struct Session {
    pub run: Arc<RankRun>,
    watcher: Mutex<Option<(Sender<WatchedOperation>, JoinHandle<()>)>>,
}

impl Session {
    /// A run without groups.
    pub fn start(
        rank: usize,
        deadline: Duration,
        compute: Arc<CudaStream>,
    ) -> std::io::Result<Self> {
        let run = Arc::new(RankRun::new(rank, deadline, compute));
        let watcher = Mutex::new(Some(watcher::start(run.clone())?));
        Ok(Self { run, watcher })
    }

    /// Hands an operation to the watcher.
    pub fn watch(&self, operation: WatchedOperation) {
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
