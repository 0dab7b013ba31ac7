//! What this process has made that goes again with it: for one that is ended in the middle.

use std::fs::{remove_dir, remove_dir_all, remove_file};
use std::io::Result;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Those of this process, the newest last.
static LEFTOVERS: Mutex<Vec<LeftoverEntry>> = Mutex::new(Vec::new());

#[derive(Clone, Debug, PartialEq)]
struct LeftoverEntry {
    path: PathBuf,
    /// Which file or folder it is, of which device: another one that has its name by now is somebody else's.
    identity: Option<(u64, u64)>,
    /// Whether a folder goes with what is in it.
    with_content: bool,
}

/// A file or folder that goes again when the process is ended, as long as this is there.
#[derive(Debug)]
pub struct Leftover(LeftoverEntry);

impl Leftover {
    /// What `make` makes at `path`, a file or a folder that goes only if it is empty: a process that is ended meanwhile has made it or not.
    pub(crate) fn make<T>(
        path: PathBuf,
        make: impl FnOnce(&Path) -> Result<T>,
    ) -> Result<(T, Self)> {
        let mut all = leftovers();
        let made = make(&path)?;
        Ok((made, Self::add(&mut all, path, false)))
    }

    /// What `make` makes and says the path of, a file or a folder that goes with all that is in it.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn with_content<T>(make: impl FnOnce() -> Result<(T, PathBuf)>) -> Result<(T, Self)> {
        let mut all = leftovers();
        let (made, path) = make()?;
        Ok((made, Self::add(&mut all, path, true)))
    }

    fn add(all: &mut Vec<LeftoverEntry>, path: PathBuf, with_content: bool) -> Self {
        let entry = LeftoverEntry {
            identity: identity(&path),
            path,
            with_content,
        };
        all.push(entry.clone());
        Self(entry)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0.path
    }
}

impl Drop for Leftover {
    fn drop(&mut self) {
        let mut all = leftovers();
        if let Some(index) = all.iter().position(|entry| *entry == self.0) {
            all.remove(index);
        }
    }
}

/// Removes the locks, the empty folders and what is not whole yet that this process has made. It must end then: nothing keeps other runs out any
/// more, and its threads wait for ever where they make more, or give what was removed its name.
pub fn remove_leftovers() {
    let all = leftovers();
    for entry in all.iter().rev() {
        let LeftoverEntry {
            path, with_content, ..
        } = entry;
        if entry.identity.is_none() || entry.identity != identity(path) {
            continue;
        }
        let removed = remove_file(path);
        // What is not empty stays, and what cannot be removed.
        let _ = removed.or_else(|_| {
            if *with_content {
                remove_dir_all(path)
            } else {
                remove_dir(path)
            }
        });
    }
    std::mem::forget(all);
}

/// Gives what was made its name, which a process that is ended meanwhile has done or not: never is half of it there.
pub(crate) fn named<T>(name: impl FnOnce() -> T) -> T {
    let _all = leftovers();
    name()
}

/// Which file or folder has this name.
fn identity(path: &Path) -> Option<(u64, u64)> {
    let metadata = path.symlink_metadata().ok()?;
    Some((metadata.dev(), metadata.ino()))
}

fn leftovers() -> MutexGuard<'static, Vec<LeftoverEntry>> {
    LEFTOVERS.lock().unwrap_or_else(PoisonError::into_inner)
}
