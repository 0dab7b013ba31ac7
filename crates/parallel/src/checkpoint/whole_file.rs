//! A file that is there whole or not at all.

use std::ffi::OsStr;
use std::fs::{File, Permissions, TryLockError, read_dir, remove_file};
use std::io::{BufWriter, Error, ErrorKind, Result, Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use candle_launch::open_own_file;
use tempfile::{Builder, NamedTempFile};

use super::folder_lock::is_at;
use crate::files::{Leftover, named};

/// How the name ends of what is not whole yet: `.NAME.RANDOM.saving`.
const SUFFIX: &str = ".saving";
/// Letters and digits of RANDOM.
const NUM_RANDOM: usize = 6;
/// But for what the umask takes, as other files.
const MODE: u32 = 0o666;

/// A file that is written beside its place and takes it when all of it is on the disk; dropped before that, it is gone, and what was in
/// its place is there. What a process that was killed has left goes when the next file is written to the same place; who writes one has
/// locked it.
#[derive(Debug)]
pub struct WholeFile {
    place: PathBuf,
    file: BufWriter<NamedTempFile>,
    _leftover: Leftover,
}

impl WholeFile {
    /// An empty file beside `place`, whose folder must exist.
    ///
    /// # Errors
    /// A folder that cannot be written to, and a place that has something else than a file.
    pub fn create(place: &Path) -> Result<Self> {
        // Not the link to it is replaced.
        let place = place.canonicalize().unwrap_or_else(|_| place.to_path_buf());
        Self::beside(place, MODE)
    }

    /// As [`Self::create`], with these permissions at most; of a link the link itself is replaced.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub fn with_mode(place: &Path, mode: u32) -> Result<Self> {
        Self::beside(place.to_path_buf(), mode)
    }

    /// Writes a file of this content in place of what is there; of a link the link itself is replaced.
    ///
    /// # Errors
    /// As [`Self::create`]; what was in the place is still there then.
    pub fn replace(place: &Path, content: &[u8]) -> Result<()> {
        let mut file = Self::beside(place.to_path_buf(), MODE)?;
        file.write_all(content)?;
        file.commit()
    }

    fn beside(place: PathBuf, mode: u32) -> Result<Self> {
        if place.exists() && !place.is_file() {
            return Err(Error::new(ErrorKind::InvalidInput, "it is no file"));
        }
        let folder = place.parent().filter(|dir| !dir.as_os_str().is_empty());
        let name = place.file_name().unwrap_or_default().to_string_lossy();
        let (folder, prefix) = (folder.unwrap_or(Path::new(".")), format!(".{name}."));
        remove_abandoned(folder, &prefix);
        let make = || {
            let file = Builder::new()
                .prefix(&prefix)
                .rand_bytes(NUM_RANDOM)
                .suffix(SUFFIX)
                .permissions(Permissions::from_mode(mode))
                .tempfile_in(folder)?;
            let path = file.path().to_path_buf();
            Ok((file, path))
        };
        loop {
            let (file, leftover) = Leftover::with_content(make)?;
            // On a file system without locks nobody can tell that it is abandoned.
            let is_taken = matches!(file.as_file().try_lock(), Err(TryLockError::WouldBlock));
            // Between the making and the locking another process may have taken it for abandoned.
            if !is_taken && is_at(file.as_file(), file.path()) {
                return Ok(Self {
                    place,
                    file: BufWriter::new(file),
                    _leftover: leftover,
                });
            }
        }
    }

    /// Flushes it to the disk and puts it in its place.
    ///
    /// # Errors
    /// What was in the place is still there then.
    pub fn commit(self) -> Result<()> {
        let file = self.file.into_inner().map_err(|err| err.into_error())?;
        file.as_file().sync_all()?;
        named(|| file.persist(self.place)).map_err(|err| err.error)?;
        Ok(())
    }
}

/// Removes what nobody writes any more. What cannot be removed stays.
fn remove_abandoned(folder: &Path, prefix: &str) {
    let is_one = |name: &OsStr| {
        let name = name.to_string_lossy();
        let random = name
            .strip_prefix(prefix)
            .and_then(|rest| rest.strip_suffix(SUFFIX));
        random.is_some_and(|random| {
            random.len() == NUM_RANDOM && random.bytes().all(|byte| byte.is_ascii_alphanumeric())
        })
    };
    let entries = read_dir(folder).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| is_one(&entry.file_name())) {
        let file = open_own_file(&entry.path(), File::options().write(true));
        if file.is_ok_and(|file| file.try_lock().is_ok()) {
            let _ = remove_file(entry.path());
        }
    }
}

impl Write for WholeFile {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> Result<()> {
        self.file.flush()
    }
}

impl Seek for WholeFile {
    fn seek(&mut self, to: SeekFrom) -> Result<u64> {
        self.file.seek(to)
    }
}
