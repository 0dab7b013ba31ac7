//! Whether there is room for what a run will write, before it begins.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use candle_core::{Result, bail};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use nix::sys::statvfs::statvfs;

/// What something will take in a folder, which need not exist yet.
#[derive(Clone, Debug)]
pub struct SpaceNeed {
    /// The folder.
    pub folder: PathBuf,
    /// What is to be written there at most, beside what is there already.
    pub num_bytes: u64,
    /// What that is, in words.
    pub what: &'static str,
}

impl SpaceNeed {
    /// What this process may write to the file system of the folder, if that tells it.
    pub fn free_bytes(&self) -> Option<u64> {
        let existing = self.folder.ancestors().find(|dir| dir.exists());
        let existing = existing.unwrap_or(Path::new("."));
        let status = statvfs(existing).ok()?;
        let has_size = status.blocks() > 0;
        let size = status.fragment_size() as u64;
        has_size.then(|| (status.blocks_available() as u64).saturating_mul(size))
    }
}

/// An error with the numbers where a file system has less room than all that is to be written to it. One that does not
/// tell how much it has passes, and so does a quota.
///
/// # Errors
/// A file system with less room, with the numbers.
pub fn check_free_space(needs: &[SpaceNeed]) -> Result<()> {
    let mut by_device: BTreeMap<u64, Vec<&SpaceNeed>> = BTreeMap::new();
    for need in needs {
        let existing = need.folder.ancestors().find_map(|dir| dir.metadata().ok());
        let existing = existing.or_else(|| Path::new(".").metadata().ok());
        if let Some(metadata) = existing {
            by_device.entry(metadata.dev()).or_default().push(need);
        }
    }
    for needs in by_device.values() {
        let bytes = needs.iter().map(|need| need.num_bytes);
        let needed = bytes.fold(0, u64::saturating_add);
        match needs[0].free_bytes() {
            Some(free) if free < needed => {
                let places: Vec<String> = needs
                    .iter()
                    .map(|need| {
                        let (bytes, folder) =
                            (size_in_words(need.num_bytes), need.folder.display());
                        format!("{} ({bytes} in {folder})", need.what)
                    })
                    .collect();
                bail!(
                    "there is not enough space for {}: {} needed, {} free\nhint: free some, or choose a folder on another file \
                     system",
                    places.join(" and "),
                    size_in_words(needed),
                    size_in_words(free)
                )
            }
            _ => {}
        }
    }
    Ok(())
}

/// A number of bytes with its unit.
pub fn size_in_words(num_bytes: u64) -> String {
    match num_bytes {
        0..10_000 => format!("{num_bytes} bytes"),
        10_000..10_000_000 => format!("{:.1} kB", num_bytes as f64 / 1e3),
        10_000_000..10_000_000_000 => format!("{:.1} MB", num_bytes as f64 / 1e6),
        _ => format!("{:.1} GB", num_bytes as f64 / 1e9),
    }
}

/// Whether files of a folder are in memory.
pub(crate) fn is_in_memory(dir: &Path) -> bool {
    statfs(dir).is_ok_and(|status| status.filesystem_type() == TMPFS_MAGIC)
}
