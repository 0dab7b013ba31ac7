//! The folder that a run writes: found, locked, and what a killed run has left there cleaned up.

use std::fs;
use std::io::{Error, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use candle_core::Result;
use nix::unistd::{AccessFlags, access};

use super::folder_lock::FolderLock;
use super::staged_folder::StagedFolder;
use crate::files::Leftover;

/// A folder to be written as a whole, by one run at a time. It need not exist, nor its parents.
#[derive(Clone, Debug)]
pub struct OutputFolder {
    path: PathBuf,
    claim: Arc<Mutex<Weak<ClaimedFolder>>>,
}

/// An [`OutputFolder`] that no other run can write to. When it is dropped, no new empty folder stays.
#[derive(Debug)]
pub struct ClaimedFolder {
    place: PathBuf,
    _lock: FolderLock,
    _parents: NewFolders,
}

impl OutputFolder {
    /// The folder at `path`; nothing is touched yet.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            claim: Arc::default(),
        }
    }

    /// As it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the folder this run's for as long as the result lives, checks that it can be written, and cleans up what a run that
    /// was killed has left. Clones of this value that claim it meanwhile get the same.
    ///
    /// # Errors
    /// Another run has it, or it cannot be written.
    pub fn claim(&self) -> Result<Arc<ClaimedFolder>> {
        let mut current = self.claim.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(claimed) = current.upgrade() {
            return Ok(claimed);
        }
        let claimed = ClaimedFolder::new(&self.path).map(Arc::new);
        let claimed = claimed.map_err(|err| self.error(&err.to_string()))?;
        *current = Arc::downgrade(&claimed);
        Ok(claimed)
    }

    /// Where the folder is or will be, if this run could [claim](Self::claim) it now; nothing is made or changed.
    ///
    /// # Errors
    /// As [`Self::claim`].
    pub fn look(&self) -> Result<PathBuf> {
        let look = || {
            let place = match there(&self.path)? {
                Some(place) => place,
                None => std::path::absolute(&self.path)?,
            };
            check_writable(place.parent().unwrap_or(&place))?;
            FolderLock::check_free(&place)?;
            Ok(place)
        };
        look().map_err(|err: Error| self.error(&err.to_string()))
    }

    pub(super) fn error(&self, why: &str) -> candle_core::Error {
        let path = self.path.display();
        candle_core::Error::msg(format!("cannot write to the output folder {path}: {why}"))
    }
}

impl From<PathBuf> for OutputFolder {
    fn from(path: PathBuf) -> Self {
        Self::new(path)
    }
}

impl ClaimedFolder {
    fn new(path: &Path) -> std::io::Result<Self> {
        let (place, parents) = resolve(path)?;
        let lock = FolderLock::acquire(&place)?;
        StagedFolder::recover(&place)?;
        // Whether one can be made.
        StagedFolder::create(&place)?;
        Ok(Self {
            place,
            _lock: lock,
            _parents: parents,
        })
    }

    /// Where it is, without links.
    pub fn place(&self) -> &Path {
        &self.place
    }

    /// An empty folder that can take its place.
    ///
    /// # Errors
    /// No folder can be made beside it.
    pub fn stage(&self) -> std::io::Result<StagedFolder> {
        StagedFolder::create(&self.place)
    }
}

/// Where a folder is that can be replaced, without links; `None` if there is none.
fn there(path: &Path) -> std::io::Result<Option<PathBuf>> {
    if path.symlink_metadata().is_err() {
        return match path.file_name() {
            Some(_) => Ok(None),
            None => Err(Error::new(ErrorKind::InvalidInput, "it has no name")),
        };
    }
    let place = fs::canonicalize(path)?;
    let metadata = place.metadata()?;
    if !metadata.is_dir() {
        return Err(Error::new(ErrorKind::NotADirectory, "it is not a folder"));
    }
    if std::env::current_dir().is_ok_and(|current| current.starts_with(&place)) {
        return Err(Error::other(
            "the program runs in it, and it would be replaced as a whole\nhint: choose a folder in it",
        ));
    }
    let parent = place.parent().map(Path::metadata).transpose()?;
    match parent.is_some_and(|parent| parent.dev() == metadata.dev()) {
        true => Ok(Some(place)),
        false => Err(Error::other(
            "it is where a file system is mounted, which cannot be replaced\nhint: choose a folder in it",
        )),
    }
}

/// An error unless files and folders can be made in `dir`, or in what is there of the path to it; nothing is made.
///
/// # Errors
/// That one, of the operating system.
pub fn check_writable(dir: &Path) -> std::io::Result<()> {
    let is_there = |dir: &&Path| dir.symlink_metadata().is_ok();
    let existing = dir.ancestors().find(is_there).unwrap_or(Path::new("."));
    if !existing.metadata()?.is_dir() {
        return Err(Error::from(ErrorKind::NotADirectory));
    }
    let rights = AccessFlags::W_OK | AccessFlags::X_OK;
    access(existing, rights).map_err(Error::from)
}

/// An error unless a file can be made at `path`, whose folder must be there; nothing is made.
///
/// # Errors
/// That one, of the operating system.
pub fn check_folder_of(path: &Path) -> std::io::Result<()> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    let dir = dir.unwrap_or(Path::new("."));
    dir.metadata()?;
    check_writable(dir)
}

/// Where the folder is or will be, without links, and the folders that were made for it.
fn resolve(path: &Path) -> std::io::Result<(PathBuf, NewFolders)> {
    if let Some(place) = there(path)? {
        return Ok((place, NewFolders::default()));
    }
    let Some(name) = path.file_name() else {
        return Err(Error::new(ErrorKind::InvalidInput, "it has no name"));
    };
    let parent = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    let parents = NewFolders::create(parent)?;
    Ok((fs::canonicalize(parent)?.join(name), parents))
}

/// Folders that were made, outermost first; those that are still empty when this is dropped go again.
#[derive(Debug, Default)]
pub(super) struct NewFolders(Vec<Leftover>);

impl NewFolders {
    /// Makes `dir` and what it is in.
    pub fn create(dir: &Path) -> std::io::Result<Self> {
        let missing = dir.ancestors().take_while(|dir| {
            let is_current = dir.as_os_str().is_empty();
            !is_current && dir.symlink_metadata().is_err()
        });
        let missing: Vec<&Path> = missing.collect();
        let mut made = Self::default();
        for dir in missing.into_iter().rev() {
            let ((), leftover) = Leftover::make(dir.to_path_buf(), |dir| fs::create_dir(dir))?;
            made.0.push(leftover);
        }
        Ok(made)
    }
}

impl Drop for NewFolders {
    fn drop(&mut self) {
        for dir in self.0.iter().rev() {
            // Fails if there is something in it, as it should.
            let _ = fs::remove_dir(dir.path());
        }
    }
}
