//! Files of this program at names that anybody can guess, in folders that others may write to: locks, caches, what is not whole yet.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{Error, Result};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::fcntl::OFlag;

/// Opens the file at `path` as `options` say, which must not truncate it: with a link somebody else can put another file there, or another
/// name of it, and a pipe would be waited for.
///
/// # Errors
/// There is something else than a file with this one name; what the file system says.
pub fn open_own_file(path: &Path, options: &mut OpenOptions) -> Result<File> {
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    match options.custom_flags(flags.bits()).open(path) {
        Ok(file) => check_own(path, &file.metadata()?).map(|()| file),
        Err(err) => match path.symlink_metadata() {
            Ok(metadata) => check_own(path, &metadata).and(Err(err)),
            Err(_) => Err(err),
        },
    }
}

fn check_own(path: &Path, metadata: &Metadata) -> Result<()> {
    let kind = metadata.file_type();
    let what = match () {
        () if kind.is_symlink() => match path.read_link() {
            Ok(target) => format!("a link to {}", target.display()),
            Err(_) => "a link".to_string(),
        },
        () if kind.is_dir() => "a folder".to_string(),
        () if kind.is_fifo() => "a pipe".to_string(),
        () if !kind.is_file() => "a socket or a device".to_string(),
        () if metadata.nlink() > 1 => "a file that has another name, too".to_string(),
        () => return Ok(()),
    };
    Err(Error::other(format!(
        "{} is {what}; expected a file of this program, or nothing\nhint: nothing was written to it: see who put it there, and remove it",
        path.display()
    )))
}
