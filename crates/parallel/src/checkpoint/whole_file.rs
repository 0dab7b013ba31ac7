//! A file that is there whole or not at all.

use std::fs::Permissions;
use std::io::{BufWriter, Error, ErrorKind, Result, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::{Builder, NamedTempFile};

/// A file that is written beside its place and takes it when all of it is on the disk; dropped before that, it is gone, and what was in
/// its place is there.
#[derive(Debug)]
pub struct WholeFile {
    place: PathBuf,
    file: BufWriter<NamedTempFile>,
}

impl WholeFile {
    /// An empty file beside `place`, whose folder must exist.
    ///
    /// # Errors
    /// A folder that cannot be written to, and a place that has something else than a file.
    pub fn create(place: &Path) -> Result<Self> {
        // Not the link to it is replaced.
        let place = place.canonicalize().unwrap_or_else(|_| place.to_path_buf());
        Self::beside(place)
    }

    /// Writes a file of this content in place of what is there; of a link the link itself is replaced.
    ///
    /// # Errors
    /// As [`Self::create`]; what was in the place is still there then.
    pub fn replace(place: &Path, content: &[u8]) -> Result<()> {
        let mut file = Self::beside(place.to_path_buf())?;
        file.write_all(content)?;
        file.commit()
    }

    fn beside(place: PathBuf) -> Result<Self> {
        if place.exists() && !place.is_file() {
            return Err(Error::new(ErrorKind::InvalidInput, "it is no file"));
        }
        let folder = place.parent().filter(|dir| !dir.as_os_str().is_empty());
        let name = place.file_name().unwrap_or_default().to_string_lossy();
        let file = Builder::new()
            .prefix(&format!(".{name}."))
            .suffix(".saving")
            // But for what the umask takes, as other files.
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(folder.unwrap_or(Path::new(".")))?;
        Ok(Self {
            place,
            file: BufWriter::new(file),
        })
    }

    /// Flushes it to the disk and puts it in its place.
    ///
    /// # Errors
    /// What was in the place is still there then.
    pub fn commit(self) -> Result<()> {
        let file = self.file.into_inner().map_err(|err| err.into_error())?;
        file.as_file().sync_all()?;
        file.persist(self.place).map_err(|err| err.error)?;
        Ok(())
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
