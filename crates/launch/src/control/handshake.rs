//! How both ends of a new connection show each other that they know the run's secret, without sending it.
//!
//! ```text
//! rank -> server    opening: magic, version of its messages and what for, 32 random bytes
//! server -> rank    32 random bytes
//! rank -> server    HMAC-SHA256(secret, "rank", opening, the server's bytes)
//! server -> rank    HMAC-SHA256(secret, "server", opening, the server's bytes), or 32 zeros if the rank's is wrong
//! ```
//! (RFC 2104.) The rank goes first: whoever connects to a server gets no byte that depends on the secret before it has shown that it knows
//! it, so there is nothing to try the words of a dictionary on. One of the two has to go first, so who takes the place of the server gets that of the ranks
//! that come: that is why [short secrets](Secret::is_short) are refused. A server answers nothing to who has come for something else than it serves, so it is
//! of no use to somebody who pretends to be a server of another kind. The random bytes are new for each connection, so what somebody heard of an
//! earlier one is of no use, and neither end can send the other its own proof back. A rank says nothing of itself before it has seen the
//! server's proof. This should not change, so that ranks of different versions can tell each other so: builds before the version 5 of ranks, in which
//! the server went first, only hang up.
//!
//! What follows is not encrypted: who can change packets between the hosts is not kept out. But the [`Key`] that both ends have now, and
//! who passes their words on has not, can seal a message.

use std::io::{Error, ErrorKind, Read, Result, Write};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::Secret;
use crate::secret::random_bytes;

const MAGIC: [u8; 8] = *b"\x89candle\n";
const NUM_RANDOM: usize = 32;
const PROOF_BYTES: usize = 32;

/// Who proves that it knows the secret, and what makes the key.
const RANK: &str = "rank";
const SERVER: &str = "server";
const KEY: &str = "key";

/// What a connection is for: the highest bits of the version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Purpose {
    /// The star of a run's ranks.
    Control = 0,
    /// Ranks among themselves.
    Peers = 1 << 30,
    Launcher = 1 << 31,
}

const PURPOSE_BITS: u32 = 3 << 30;

/// What only the two ends of this connection know.
pub(crate) struct Key(Hmac<Sha256>);

impl Key {
    /// The seal of a message, which no message of another kind or connection has.
    pub(crate) fn seal(&self, kind: &str, message: &[u8]) -> [u8; PROOF_BYTES] {
        self.mac(kind, message).finalize().into_bytes().into()
    }

    pub(crate) fn is_seal(&self, seal: &[u8], kind: &str, message: &[u8]) -> bool {
        is_proof(seal, self.mac(kind, message))
    }

    fn mac(&self, kind: &str, message: &[u8]) -> Hmac<Sha256> {
        let mac = self.0.clone().chain_update(kind);
        mac.chain_update([0]).chain_update(message)
    }
}

/// As a rank whose messages are of `version`: the connection's key.
///
/// # Errors
/// The other end does not know the secret ([`ErrorKind::PermissionDenied`]); the connection breaks off, or ends in time.
pub(crate) fn as_rank(
    stream: &mut (impl Read + Write),
    secret: &Secret,
    (purpose, version): (Purpose, u32),
) -> Result<Key> {
    let random = random_bytes::<NUM_RANDOM>()?;
    let version = purpose as u32 | version;
    let opening = [MAGIC.as_slice(), &version.to_le_bytes(), &random].concat();
    stream.write_all(&opening)?;
    let (mut random, mut proof) = ([0; NUM_RANDOM], [0; PROOF_BYTES]);
    stream.read_exact(&mut random)?;
    let own = mac(secret, RANK, &opening, &random)?.finalize();
    stream.write_all(&own.into_bytes())?;
    stream.read_exact(&mut proof)?;
    if !is_proof(&proof, mac(secret, SERVER, &opening, &random)?) {
        let message = "who listens there does not know this run's secret: it is another run, or another program";
        return Err(Error::new(ErrorKind::PermissionDenied, message));
    }
    key(secret, &opening, &random)
}

/// As the server: the version of the messages of a rank that knows the secret, and the connection's key.
///
/// # Errors
/// The other end does not know it, or comes for something else; the connection breaks off, or ends in time.
pub(crate) fn as_server(
    stream: &mut (impl Read + Write),
    secret: &Secret,
    purpose: Purpose,
) -> Result<(u32, Key)> {
    let (mut magic, mut version, mut random) = ([0; MAGIC.len()], [0; 4], [0; NUM_RANDOM]);
    stream.read_exact(&mut magic)?;
    if magic != MAGIC {
        let message = "it does not speak the control protocol";
        return Err(Error::new(ErrorKind::InvalidData, message));
    }
    stream.read_exact(&mut version)?;
    stream.read_exact(&mut random)?;
    let opening = [magic.as_slice(), &version, &random].concat();
    let version = u32::from_le_bytes(version);
    if version & PURPOSE_BITS != purpose as u32 {
        let message = format!("its messages are of version {version:#x}, not for {purpose:?}");
        return Err(Error::new(ErrorKind::InvalidData, message));
    }
    let random = random_bytes::<NUM_RANDOM>()?;
    stream.write_all(&random)?;
    let mut proof = [0; PROOF_BYTES];
    stream.read_exact(&mut proof)?;
    if !is_proof(&proof, mac(secret, RANK, &opening, &random)?) {
        // So that it knows why: a server that is busy hangs up, too.
        stream.write_all(&[0; PROOF_BYTES])?;
        let message = "it does not know the run's secret";
        return Err(Error::new(ErrorKind::PermissionDenied, message));
    }
    let proof = mac(secret, SERVER, &opening, &random)?.finalize();
    stream.write_all(&proof.into_bytes())?;
    let key = key(secret, &opening, &random)?;
    Ok((version & !PURPOSE_BITS, key))
}

fn key(secret: &Secret, opening: &[u8], random: &[u8]) -> Result<Key> {
    let bytes = mac(secret, KEY, opening, random)?.finalize().into_bytes();
    let mac = Hmac::new_from_slice(&bytes).map_err(Error::other)?;
    Ok(Key(mac))
}

fn mac(secret: &Secret, who: &str, opening: &[u8], random: &[u8]) -> Result<Hmac<Sha256>> {
    let mac = Hmac::<Sha256>::new_from_slice(secret.as_str().as_bytes()).map_err(Error::other)?;
    Ok(mac
        .chain_update(who)
        .chain_update(opening)
        .chain_update(random))
}

/// Whether it is this proof, found in a time that does not tell by how much it is not.
fn is_proof(proof: &[u8], expected: Hmac<Sha256>) -> bool {
    expected.verify_slice(proof).is_ok()
}
