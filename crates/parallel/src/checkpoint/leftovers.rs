//! What a run has made that goes again with it: for a run that is ended in the middle, before it has written anything.

use std::fs::{remove_dir, remove_file};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Those of this process, the newest last.
static LEFTOVERS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// The file of a lock, or a folder that goes again if it is empty, as long as it is there.
#[derive(Debug)]
pub(super) struct Leftover(PathBuf);

impl Leftover {
    pub fn new(path: PathBuf) -> Self {
        leftovers().push(path.clone());
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Leftover {
    fn drop(&mut self) {
        leftovers().retain(|path| *path != self.0);
    }
}

/// Removes the files for locks and the empty folders that this process has made. It must end then: nothing keeps other runs out any more.
pub fn remove_leftovers() {
    for path in leftovers().iter().rev() {
        // What is not empty stays.
        let _ = remove_file(path).or_else(|_| remove_dir(path));
    }
}

fn leftovers() -> MutexGuard<'static, Vec<PathBuf>> {
    LEFTOVERS.lock().unwrap_or_else(PoisonError::into_inner)
}
