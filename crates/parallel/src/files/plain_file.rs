//! Files that are read: plain ones, as opening a pipe waits for ever and a device has no end.

use std::fs::{File, metadata};
use std::io::{Error, ErrorKind, Read, Result};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use nix::errno::Errno;

/// How a file begins that Git LFS has put in the place of a large one.
const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/v1\n";
/// Such files are smaller.
const LFS_POINTER_BYTES: u64 = 1024;

/// Opens a file to read it.
///
/// # Errors
/// As [`check_file`], and what the file system says.
pub fn open_file(path: &Path) -> Result<File> {
    check_file(path)?;
    tracing::debug!("{} is read", path.display());
    File::open(path)
}

/// The bytes of a file, as many as it has when it is opened: one that grows meanwhile has an end.
///
/// # Errors
/// As [`open_file`].
pub fn read_file(path: &Path) -> Result<Vec<u8>> {
    let file = open_file(path)?;
    let len = file.metadata()?.len();
    let mut bytes = Vec::new();
    file.take(len).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The text of a file.
///
/// # Errors
/// As [`read_file`]; bytes that are no UTF-8.
pub fn read_text_file(path: &Path) -> Result<String> {
    let not_text = |err| Error::new(ErrorKind::InvalidData, format!("it is not UTF-8: {err}"));
    String::from_utf8(read_file(path)?).map_err(|err| not_text(err.utf8_error()))
}

/// An error unless there is a file at `path`, or at the end of a link there.
///
/// # Errors
/// What is there instead, in words: a folder, a pipe, a socket or a device, a link to nothing or a loop of links, or a Git LFS pointer; that a
/// small file cannot be opened. Of the kind [`ErrorKind::NotFound`] only if nothing is there, and no link.
pub fn check_file(path: &Path) -> Result<()> {
    let (kind, len) = match metadata(path) {
        Ok(metadata) => (metadata.file_type(), metadata.len()),
        Err(err) => return Err(with_links(path, err)),
    };
    let hint = "\nhint: write what comes out of it to a file, which is read more than once";
    let (what, hint) = match () {
        () if kind.is_file() && len < LFS_POINTER_BYTES => return check_content(path),
        () if kind.is_file() => return Ok(()),
        () if kind.is_dir() => ("folder", ""),
        () if kind.is_fifo() => ("pipe", hint),
        () if kind.is_socket() => ("socket", ""),
        () => ("device", ""),
    };
    Err(Error::new(
        ErrorKind::InvalidInput,
        format!("it is a {what}, expected a file{hint}"),
    ))
}

/// An error if a small file is a Git LFS pointer.
fn check_content(path: &Path) -> Result<()> {
    let mut start = Vec::new();
    let file = File::open(path)?;
    file.take(LFS_POINTER.len() as u64)
        .read_to_end(&mut start)?;
    match start == LFS_POINTER {
        true => Err(Error::new(
            ErrorKind::InvalidData,
            "it is a Git LFS pointer, which stands for the file and is not the file itself\nhint: git lfs pull in its repository fetches the file",
        )),
        false => Ok(()),
    }
}

/// Why there is nothing at the end of links.
fn with_links(path: &Path, err: Error) -> Error {
    if err.raw_os_error() == Some(Errno::ELOOP as i32) {
        return Error::other("it is in a loop of links, which lead to no file");
    }
    let is_broken = |path: &&Path| path.is_symlink() && !path.exists();
    let broken = path.ancestors().find(is_broken);
    match broken.and_then(|link| Some((link, link.read_link().ok()?))) {
        Some((link, target)) => Error::other(format!(
            "{} is a link to {}, which is missing",
            link.display(),
            target.display()
        )),
        None => err,
    }
}
