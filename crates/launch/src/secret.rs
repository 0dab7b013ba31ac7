//! What the ranks of a run know and others do not.

use std::fmt;
use std::fs::File;
use std::io::Read;

use crate::{Error, Result};

/// A secret of fewer bytes may be guessed by trying words.
const LEAST_BYTES: usize = 16;

/// What the ranks of a run know and others do not. It does not show in debug output.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// 128 random bits as hexadecimal digits.
    ///
    /// # Errors
    /// The system has no random bytes.
    pub fn random() -> Result<Self> {
        let bytes = random_bytes::<16>()
            .map_err(|error| Error::Environment(format!("cannot read /dev/urandom: {error}")))?;
        Ok(Self(
            bytes.iter().map(|byte| format!("{byte:02x}")).collect(),
        ))
    }

    /// Whether it has fewer than 16 bytes: who takes the place of rank 0, or of the launcher that leads, could guess it by trying words.
    pub fn is_short(&self) -> bool {
        self.0.len() < LEAST_BYTES
    }

    /// The secret itself, for whoever is to know it.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl<S: Into<String>> From<S> for Secret {
    fn from(secret: S) -> Self {
        Self(secret.into())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Bytes that nobody can guess.
pub(crate) fn random_bytes<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}
