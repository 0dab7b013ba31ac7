//! A call to the front: an authenticated connection of a process that the front has not started itself.

use std::io::{Error, ErrorKind, Result, Write};
use std::net::TcpStream;
use std::time::Duration;

use nix::sys::socket::{setsockopt, sockopt};
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
    /// A host, which waits for an [`Order`].
    Host(Offer),
    /// What stands for ssh: whoever is at the other end wants to run a command on the host of this name.
    Shell { host: String, command: String },
}

/// What a host offers to a run that another one leads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Offer {
    pub(super) name: String,
    pub(super) num_ranks: usize,
    /// What was to be started there, which must be the same everywhere.
    pub(super) program: Vec<String>,
}

/// What a host that has called is told, once.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// Run this in a shell; from now on the connection is its stdin and stdout.
    Run(String),
    /// Nothing more is needed: the exit code, and why.
    End(u8, String),
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
    keep_alive(&stream)?;
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
    keep_alive(stream)?;
    Ok(caller)
}

impl Order {
    /// Tells it to a host.
    pub(super) fn send(&self, mut host: &TcpStream) -> Result<()> {
        host.write_all(&wire::frame(self, &[])?)
    }

    /// Waits for it.
    pub(super) fn receive(mut front: &TcpStream) -> Result<Self> {
        Ok(wire::read(&mut front, Limits::STRANGER)?.0)
    }
}

/// Has the kernels ask each other whether they live: nobody else may say anything for hours.
fn keep_alive(stream: &TcpStream) -> Result<()> {
    Ok(setsockopt(stream, sockopt::KeepAlive, &true)?)
}
