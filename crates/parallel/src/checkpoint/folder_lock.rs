//! One writer at a time, by a lock that the death of its process releases.

use std::fs::{File, TryLockError};
use std::io::{Error, Read, Result, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::staged_folder::beside;

/// The right to write a folder or file, held until it is dropped: a locked file, `.NAME.lock` beside it or `.lock` in it.
///
/// On a file system without locks nobody is kept out.
#[derive(Debug)]
pub struct FolderLock {
    path: PathBuf,
    _file: File,
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

    fn lock(path: PathBuf) -> Result<Self> {
        loop {
            let mut options = File::options();
            let mut file = options
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(&path)?;
            if let Err(TryLockError::WouldBlock) = file.try_lock() {
                let mut holder = String::new();
                let _ = file.read_to_string(&mut holder);
                return Err(Error::other(format!(
                    "another run is writing to it ({}, which has locked {})\nhint: wait for its end, or choose another folder",
                    holder.trim(),
                    path.display()
                )));
            }
            // The one who had it before removes the file: between the opening and the locking this may have become nobody's.
            let is_current = std::fs::metadata(&path)
                .is_ok_and(|now| file.metadata().is_ok_and(|own| own.ino() == now.ino()));
            if is_current {
                file.set_len(0)?;
                writeln!(file, "process {}", std::process::id())?;
                return Ok(Self { path, _file: file });
            }
        }
    }
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        // While it is locked. One that stays is no harm.
        let _ = std::fs::remove_file(&self.path);
    }
}
