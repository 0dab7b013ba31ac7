//! A call to the front: an authenticated connection of a process that the front has not started itself.

use std::io::{Error, ErrorKind, Result, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Secret;
use crate::control::handshake;
use crate::control::wire::{self, Limits, Timed};

/// Beside the ranks' own versions of messages, so that neither takes a connection of the other kind.
const VERSION: u32 = 1 << 31 | 1;
/// How long either end waits for the other.
const PATIENCE: Duration = Duration::from_secs(10);

/// Who calls, and for what.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Caller {
    /// The agent of this rank, which MPI has started.
    Rank(usize),
}

/// Calls the front at `HOST:PORT`.
///
/// # Errors
/// Nobody is there, or somebody who does not know the secret.
pub(super) fn call(front: &str, secret: &Secret, caller: &Caller) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(front)?;
    stream.set_nodelay(true)?;
    let mut timed = Timed::new(stream.try_clone()?, PATIENCE);
    if !handshake::as_rank(&mut timed, secret, VERSION)? {
        let message = "who listens there does not know this run's secret";
        return Err(Error::new(ErrorKind::PermissionDenied, message));
    }
    timed.lift()?;
    stream.write_all(&wire::frame(caller, &[])?)?;
    Ok(stream)
}

/// Answers a call: who it is, if that one knows the secret.
pub(super) fn answer(stream: &TcpStream, secret: &Secret, limit: Duration) -> Result<Caller> {
    stream.set_nodelay(true)?;
    let mut timed = Timed::new(stream.try_clone()?, limit);
    if handshake::as_server(&mut timed, secret)? != VERSION {
        let message = "it is no process of this version of the launcher";
        return Err(Error::new(ErrorKind::InvalidData, message));
    }
    let (caller, _) = wire::read(&mut timed, Limits::STRANGER)?;
    timed.lift()?;
    Ok(caller)
}
