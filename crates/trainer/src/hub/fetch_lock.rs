//! One process of a host fetches a model; the others wait for it and find it in the cache.

use std::fs::{File, TryLockError};
use std::path::Path;

use candle_parallel::checkpoint::open_own_file;

use super::RepoSpec;

/// The right to fetch a model into a cache, until it is dropped or the process ends.
pub(super) struct FetchLock {
    _file: Option<File>,
}

impl FetchLock {
    /// Waits until no other process fetches this model into this cache.
    ///
    /// Where there can be no lock, as in a cache that is complete and read-only, it goes on without: files get their names when
    /// they are whole, so processes that fetch at the same time only move too many bytes.
    pub(super) fn wait(cache_dir: &Path, spec: &RepoSpec) -> Self {
        let dir = cache_dir.join(".locks");
        let name = format!("candle-train--{}.lock", spec.repo_id.replace('/', "--"));
        let path = dir.join(name);
        let open = || {
            let mut options = File::options();
            let options = options.write(true).create(true);
            open_own_file(&path, options.truncate(false))
        };
        let file = std::fs::create_dir_all(&dir).and_then(|()| open());
        let locked = file.and_then(|file| {
            if let Err(TryLockError::WouldBlock) = file.try_lock() {
                tracing::info!("waiting for another process that fetches {spec}");
            }
            // Granted at once if it is held already.
            file.lock().map(|()| file)
        });
        Self { _file: locked.ok() }
    }
}
