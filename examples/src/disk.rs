//! What offloaded tensors read and write, and how long a plain copy of as many bytes takes.

use std::fs::File;
use std::io::{Read, Result, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Instant;

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

/// Bytes that the process has moved from and to files, pipes and sockets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MovedBytes {
    /// By `read` and its like.
    pub read: u64,
    /// By `write` and its like.
    pub written: u64,
}

/// Of the plain file.
const FILE: usize = 1 << 30;
/// Between two waits for the disk: about an item of the optimizer's state.
const ITEM: usize = 40 << 20;
/// Of a call.
const CHUNK: usize = 1 << 20;

/// What the process has moved so far, as Linux counts it; zeros if it does not.
pub fn moved_bytes() -> MovedBytes {
    let counts = std::fs::read_to_string("/proc/self/io").unwrap_or_default();
    let of = |name: &str| {
        let mut lines = counts.lines().filter_map(|line| line.split_once(": "));
        let (_, count) = lines.find(|(key, _)| *key == name)?;
        count.parse().ok()
    };
    MovedBytes {
        read: of("rchar").unwrap_or_default(),
        written: of("wchar").unwrap_or_default(),
    }
}

/// The seconds in which a file in `dir` is written and read one after the other, by the calls of offloaded tensors, with so many bytes each: from
/// a gibibyte that is.
///
/// # Errors
/// A folder that cannot be written to.
pub fn plain_copy_secs(dir: &Path, moved: MovedBytes) -> Result<f64> {
    let mut file = tempfile::tempfile_in(dir)?;
    let mut bytes = vec![1; CHUNK];
    let start = Instant::now();
    for _ in 0..FILE / ITEM {
        for _ in 0..ITEM / CHUNK {
            file.write_all(&bytes)?;
        }
        file.sync_data()?;
        leave_cache(&file)?;
    }
    let write = start.elapsed().as_secs_f64();
    file.seek(SeekFrom::Start(0))?;
    let start = Instant::now();
    for _ in 0..FILE / ITEM {
        for _ in 0..ITEM / CHUNK {
            file.read_exact(&mut bytes)?;
        }
        leave_cache(&file)?;
    }
    let read = start.elapsed().as_secs_f64();
    let of_file = (FILE / ITEM * ITEM) as f64;
    Ok((moved.written as f64 * write + moved.read as f64 * read) / of_file)
}

fn leave_cache(file: &File) -> Result<()> {
    posix_fadvise(file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).map_err(Into::into)
}
