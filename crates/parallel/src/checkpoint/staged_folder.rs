//! A folder that is written beside its place and gets its name when all of it is on the disk.
//!
//! ```text
//! .NAME.saving     what is being written; after the names were exchanged, what was NAME before
//! .NAME.replaced   what was NAME before, until this one has the name, where a file system cannot exchange names
//! .NAME.removed    what is being deleted
//! ```
//! Who writes holds the [`FolderLock`](super::FolderLock) of the place, so what has these names is a dead process's.

use std::fs::{self, File};
use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};

use crate::files::{Leftover, named};

/// A folder that does not have its name yet; dropped before that, it is gone.
#[derive(Debug)]
pub struct StagedFolder {
    place: PathBuf,
    staged: PathBuf,
    is_committed: bool,
    _leftover: Leftover,
}

impl StagedFolder {
    /// An empty folder beside `place`, whose parent must exist.
    ///
    /// # Errors
    /// No folder can be made there.
    pub fn create(place: &Path) -> Result<Self> {
        let staged = beside(place, "saving")?;
        remove(&staged)?;
        let make = || fs::create_dir(&staged).map(|()| ((), staged.clone()));
        let ((), _leftover) = Leftover::with_content(make)?;
        Ok(Self {
            place: place.to_path_buf(),
            _leftover,
            staged,
            is_committed: false,
        })
    }

    /// Where to write.
    pub fn path(&self) -> &Path {
        &self.staged
    }

    /// Flushes every file and folder to the disk and gives the folder its name. With `replaces`, what has the name is replaced;
    /// without, only an empty folder is.
    ///
    /// # Errors
    /// If any of it fails, what had the name still has it. A process that is killed on the way leaves the one or the other complete,
    /// perhaps without its name, which [`Self::recover`] gives back.
    pub fn commit(mut self, replaces: bool) -> Result<()> {
        sync_all(&self.staged)?;
        let replaced = named(|| match fs::rename(&self.staged, &self.place) {
            Err(err) if replaces && is_not_empty(&err) => self.swap(),
            renamed => renamed.map(|()| None),
        })?;
        self.is_committed = true;
        // What stays of it is deleted by `recover`. This may take long, and holds up nobody who ends the process.
        match replaced {
            Some(replaced) if replaced == self.staged => drop(remove(&replaced)),
            Some(replaced) => drop(delete(&self.place, &replaced)),
            None => {}
        }
        // It has its name, whatever becomes of it in a power failure.
        if let Err(err) = sync_parent(&self.place) {
            tracing::warn!(
                "{} is written, but its name could not be flushed to the disk: {err}",
                self.place.display()
            );
        }
        Ok(())
    }

    /// Takes the place of what has the name: at no moment does nothing have it, where the file system can exchange two folders. Returns where
    /// what was replaced is, if it may be deleted.
    fn swap(&mut self) -> Result<Option<PathBuf>> {
        if exchange(&self.staged, &self.place).is_ok() {
            // What has the staged name now is what was replaced.
            let is_flushed = sync_parent(&self.place).is_ok();
            return Ok(is_flushed.then(|| self.staged.clone()));
        }
        let replaced = beside(&self.place, "replaced")?;
        fs::rename(&self.place, &replaced)?;
        let renamed = sync_parent(&self.place).and_then(|()| fs::rename(&self.staged, &self.place));
        if let Err(err) = renamed {
            // If this fails too, both are complete, and `recover` chooses.
            self.is_committed = fs::rename(&replaced, &self.place).is_err();
            return Err(err);
        }
        let is_flushed = sync_parent(&self.place).is_ok();
        Ok(is_flushed.then_some(replaced))
    }

    /// Finishes or removes what a process that was killed has left beside `place`.
    ///
    /// # Errors
    /// A failure of the file system, or folders that no order of events explains.
    pub fn recover(place: &Path) -> Result<()> {
        remove(&beside(place, "removed")?)?;
        let (staged, replaced) = (beside(place, "saving")?, beside(place, "replaced")?);
        if replaced.is_dir() {
            let is_free = match fs::read_dir(place) {
                Ok(mut entries) => entries.next().is_none(),
                Err(err) if err.kind() == ErrorKind::NotFound => true,
                Err(err) => return Err(err),
            };
            match (is_free, staged.is_dir()) {
                // Between the two renames: what was to come is complete.
                (true, true) => fs::rename(&staged, place)?,
                (true, false) => fs::rename(&replaced, place)?,
                (false, false) => {}
                (false, true) => {
                    return Err(Error::other(format!(
                        "a save that was killed has left {} and {}, both complete, and now {} is there too\nhint: keep what you \
                         need and remove the first two",
                        staged.display(),
                        replaced.display(),
                        place.display()
                    )));
                }
            }
            sync_parent(place)?;
            if replaced.is_dir() {
                delete(place, &replaced)?;
            }
        }
        remove(&staged)
    }
}

impl Drop for StagedFolder {
    fn drop(&mut self) {
        if !self.is_committed {
            // What stays is removed by the next one.
            let _ = fs::remove_dir_all(&self.staged);
        }
    }
}

/// Gives each of two folders the other's name, in one step.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn exchange(one: &Path, other: &Path) -> Result<()> {
    use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
    let flags = RenameFlags::RENAME_EXCHANGE;
    renameat2(AT_FDCWD, one, AT_FDCWD, other, flags).map_err(Error::from)
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn exchange(_one: &Path, _other: &Path) -> Result<()> {
    Err(Error::from(ErrorKind::Unsupported))
}

/// `.NAME.role` in the folder of `place`.
pub(super) fn beside(place: &Path, role: &str) -> Result<PathBuf> {
    let Some(name) = place.file_name() else {
        let message = format!("{} has no name; expected one of a folder", place.display());
        return Err(Error::new(ErrorKind::InvalidInput, message));
    };
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(".");
    hidden.push(role);
    Ok(place.with_file_name(hidden))
}

/// Deletes a folder beside `place` that was complete: at no moment a part of it has its name.
fn delete(place: &Path, dir: &Path) -> Result<()> {
    let removed = beside(place, "removed")?;
    remove(&removed)?;
    fs::rename(dir, &removed)?;
    remove(&removed)
}

fn remove(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(err) if err.kind() != ErrorKind::NotFound => Err(err),
        _ => Ok(()),
    }
}

fn is_not_empty(err: &Error) -> bool {
    matches!(
        err.kind(),
        ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists
    )
}

fn sync_all(path: &Path) -> Result<()> {
    if path.is_dir() {
        for entry in fs::read_dir(path)? {
            sync_all(&entry?.path())?;
        }
    }
    File::open(path)?.sync_all()
}

fn sync_parent(path: &Path) -> Result<()> {
    match path.parent() {
        Some(parent) => File::open(parent)?.sync_all(),
        None => Ok(()),
    }
}
