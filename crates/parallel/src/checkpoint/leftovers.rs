//! What a run has made that goes again with it: for a run that is ended in the middle, before it has written anything.

use std::fs::{remove_dir, remove_file};
use std::io::Result;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Those of this process, the newest last.
static LEFTOVERS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// The file of a lock, or a folder that goes again if it is empty, as long as it is there.
#[derive(Debug)]
pub(super) struct Leftover(PathBuf);

impl Leftover {
    /// What `make` makes at `path`: a process that is ended meanwhile has made it or not.
    pub fn make<T>(path: PathBuf, make: impl FnOnce(&Path) -> Result<T>) -> Result<(T, Self)> {
        let mut all = leftovers();
        let made = make(&path)?;
        all.push(path.clone());
        Ok((made, Self(path)))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Leftover {
    fn drop(&mut self) {
        let mut all = leftovers();
        if let Some(index) = all.iter().position(|path| *path == self.0) {
            all.remove(index);
        }
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
