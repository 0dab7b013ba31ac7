//! One writer at a time, by a lock that the death of its process releases.

use std::fs::{File, Metadata, TryLockError};
use std::io::{Error, Read, Result, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use candle_launch::open_own_file;

use super::staged_folder::beside;
use crate::files::Leftover;

/// The right to write a folder or file, held until it is dropped: a locked file, `.NAME.lock` beside it or `.lock` in it.
///
/// On a file system without locks nobody is kept out.
#[derive(Debug)]
pub struct FolderLock {
    place: Leftover,
    file: File,
}

impl FolderLock {
    /// Locks `place`, which need not exist; its parent must.
    ///
    /// # Errors
    /// Another run has it, or the file for the lock cannot be made.
    pub fn acquire(place: &Path) -> Result<Self> {
        Self::lock(beside(place, "lock")?)
    }

    /// Locks the folder `dir` itself, by `.lock` in it.
    ///
    /// # Errors
    /// As [`Self::acquire`].
    pub fn acquire_inside(dir: &Path) -> Result<Self> {
        Self::lock(dir.join(".lock"))
    }

    /// An error if another run has locked `place`; nothing is made or locked.
    ///
    /// # Errors
    /// That one.
    pub fn check_free(place: &Path) -> Result<()> {
        Self::check_unlocked(&beside(place, "lock")?)
    }

    /// As [`Self::check_free`] of the folder `dir` itself.
    ///
    /// # Errors
    /// That one.
    pub fn check_free_inside(dir: &Path) -> Result<()> {
        Self::check_unlocked(&dir.join(".lock"))
    }

    fn check_unlocked(path: &Path) -> Result<()> {
        match open_own_file(path, File::options().read(true)) {
            Ok(mut file) => match file.try_lock_shared() {
                Err(TryLockError::WouldBlock) => Err(is_held_by_another(&mut file, path)),
                _ => Ok(()),
            },
            // Those of the file system may be nobody's business: a lock that is not there, or of another user.
            Err(err) if err.raw_os_error().is_none() => Err(err),
            Err(_) => Ok(()),
        }
    }

    /// Whether it still keeps others out: nobody has removed the file, or the folder that it is in.
    pub fn is_held(&self) -> bool {
        is_at(&self.file, self.place.path())
    }

    fn lock(path: PathBuf) -> Result<Self> {
        let (file, place) = Leftover::make(path, locked)?;
        Ok(Self { place, file })
    }
}

/// The file at `path`, made if there is none, and locked.
fn locked(path: &Path) -> Result<File> {
    loop {
        let mut options = File::options();
        let options = options.read(true).write(true).create(true);
        let mut file = open_own_file(path, options.truncate(false))?;
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            return Err(is_held_by_another(&mut file, path));
        }
        // The one who had it before removes the file: between the opening and the locking this may have become nobody's.
        if is_at(&file, path) {
            file.set_len(0)?;
            writeln!(file, "process {}", std::process::id())?;
            return Ok(file);
        }
    }
}

fn is_held_by_another(file: &mut File, path: &Path) -> Error {
    let mut holder = String::new();
    let _ = file.read_to_string(&mut holder);
    Error::other(format!(
        "another run is writing to it ({}, which has locked {})\nhint: wait for its end, or choose another folder",
        holder.trim(),
        path.display()
    ))
}

/// Whether this file has this name, still.
pub(super) fn is_at(file: &File, path: &Path) -> bool {
    let named = std::fs::symlink_metadata(path);
    let is_same =
        |named: Metadata, own: Metadata| (own.dev(), own.ino()) == (named.dev(), named.ino());
    named.is_ok_and(|named| file.metadata().is_ok_and(|own| is_same(named, own)))
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        // While it is locked. One that stays is no harm.
        if self.is_held() {
            let _ = std::fs::remove_file(self.place.path());
        }
    }
}
