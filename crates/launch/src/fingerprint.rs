//! What must be the same on all ranks of a run: flags, data, model and the program itself.

use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use crate::{Error, Result};

/// Bytes of a file that are read at a time.
const BLOCK: usize = 64 << 10;

/// Blocks that are read of a file; a larger one is read at as many places, spread evenly.
const MAX_BLOCKS: u64 = 256;

/// Names and values that the ranks of a run compare when they meet, before they load or move anything large: a run whose
/// ranks differ is refused with the difference.
///
/// Digests are 64 bits of SipHash, as the ranks compute them with the same program. They find mistakes, not attacks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fingerprint {
    entries: Vec<(String, String)>,
}

impl Fingerprint {
    /// The running program, by its bytes: ranks of another build have another digest.
    ///
    /// # Errors
    /// The program's file cannot be read.
    pub fn of_program() -> Result<Self> {
        // Through /proc the file is found even if it has been replaced since the start.
        Self::default().file("the program", Path::new("/proc/self/exe"))
    }

    /// Adds a value.
    pub fn value(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.entries.push((name.into(), value.into()));
        self
    }

    /// Adds the digest of a file: of all of it up to 16 MiB, else of 256 blocks of 64 KiB, spread evenly.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn file(self, name: impl Into<String>, path: &Path) -> Result<Self> {
        match digest_of_file(path) {
            Ok(value) => Ok(self.value(name, value)),
            Err(error) => Err(Error::Environment(format!(
                "cannot read {} to compare it with the other ranks' file: {error}",
                path.display()
            ))),
        }
    }

    /// Names and values, in the order in which they were added.
    pub fn into_entries(self) -> Vec<(String, String)> {
        self.entries
    }
}

fn digest_of_file(path: &Path) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    let len = file.metadata()?.len();
    let num_blocks = len.div_ceil(BLOCK as u64);
    let num_read = num_blocks.min(MAX_BLOCKS);
    let mut hasher = DefaultHasher::new();
    let mut block = vec![0; BLOCK];
    for index in 0..num_read {
        // The first and the last block are among them.
        let number = match num_read {
            1 => 0,
            _ => (u128::from(index) * u128::from(num_blocks - 1) / u128::from(num_read - 1)) as u64,
        };
        let start = number * BLOCK as u64;
        let wanted = (len - start).min(BLOCK as u64) as usize;
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(&mut block[..wanted])?;
        hasher.write(&block[..wanted]);
    }
    Ok(format!("{:016x} ({len} bytes)", hasher.finish()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn of_file(bytes: &[u8]) -> String {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        let entries = Fingerprint::default().file("it", file.path());
        entries.unwrap().into_entries().remove(0).1
    }

    #[test]
    fn a_byte_changes_the_digest_of_a_file() {
        for len in [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17] {
            let bytes = vec![7; len];
            let before = of_file(&bytes);
            assert_eq!(of_file(&bytes), before);
            for changed in [0, len / 2, len - 1] {
                let mut bytes = bytes.clone();
                bytes[changed] ^= 1;
                assert_ne!(of_file(&bytes), before, "byte {changed} of {len}");
            }
        }
        assert_eq!(of_file(b""), of_file(b""));
        assert_ne!(of_file(b""), of_file(b"\0"));
    }

    #[test]
    fn the_ends_of_a_large_file_count() {
        let bytes = vec![7; 300 * BLOCK + 5];
        let before = of_file(&bytes);
        for changed in [0, bytes.len() - 1] {
            let mut bytes = bytes.clone();
            bytes[changed] ^= 1;
            assert_ne!(of_file(&bytes), before, "byte {changed}");
        }
    }

    #[test]
    fn the_program_and_a_file_that_is_not_there() {
        let program = Fingerprint::of_program().unwrap();
        assert_eq!(program, Fingerprint::of_program().unwrap());
        let missing = program.file("data", Path::new("/nowhere/at/all"));
        let message = missing.unwrap_err().to_string();
        assert!(message.contains("/nowhere/at/all"), "{message}");
    }
}
