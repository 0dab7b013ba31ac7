//! Random bytes of the system.

use std::fs::File;
use std::io::{Read, Result};

/// Bytes that nobody can guess.
pub(crate) fn random_bytes<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// A secret for a run: 128 random bits as hexadecimal digits.
///
/// # Errors
/// The system has no random bytes.
pub fn random_secret() -> crate::Result<String> {
    let bytes = random_bytes::<16>().map_err(|error| {
        crate::Error::Environment(format!("cannot read /dev/urandom for a secret: {error}"))
    })?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
