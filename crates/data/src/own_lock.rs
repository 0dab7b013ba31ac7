//! One process of a host makes what is in a cache; the others wait for it.

use std::fs::{self, File, TryLockError};
use std::path::Path;

use candle_parallel::checkpoint::open_own_file;

/// Waits until no other process holds the lock at `path`, and holds it until the file is dropped or the process ends; `waits` is called if
/// there is one.
///
/// Where there can be no lock, as in a cache that is complete and read-only, it goes on without: files get their names when they are
/// whole, so processes that make the same only do it more than once.
pub(crate) fn lock(path: &Path, waits: impl FnOnce()) -> Option<File> {
    fs::create_dir_all(path.parent()?).ok()?;
    let mut options = File::options();
    let options = options.write(true).create(true).truncate(false);
    let file = open_own_file(path, options).ok()?;
    if let Err(TryLockError::WouldBlock) = file.try_lock() {
        waits();
    }
    // Granted at once if it is held already.
    file.lock().ok().map(|()| file)
}
