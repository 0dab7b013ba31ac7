//! A call to the front: an authenticated connection of a process that the front has not started itself.

use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result, Write, copy, stdin, stdout};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::host::Host;
use super::rendezvous_address::RendezvousAddress;
use super::say::say;
use super::thread;
use crate::Secret;
use crate::control::handshake::{self, Key, Purpose};
use crate::control::wire::{self, Limits, Timed};
use crate::rank_env::given_secret;

/// The version of the messages.
const VERSION: u32 = 4;
/// Of a launcher that another version leads: nothing was started.
const OTHER_VERSION_EXIT_CODE: u8 = 2;
/// How long either end waits for the other.
const PATIENCE: Duration = Duration::from_secs(10);

/// Who calls, and for what.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Caller {
    /// The agent of this rank, which MPI has started.
    Rank(usize),
    /// A host, which waits for an [`Order`]; what was to be started there must be the same everywhere.
    Host { host: Host, program: Vec<String> },
    /// What stands for ssh: whoever is at the other end wants to run a command on the host of this name.
    Shell { host: String, command: String },
}

/// What a host that has called is told, once; before, that the launcher that leads lives.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// Run this in a shell; from now on the connection is its stdin and stdout.
    Run(String),
    /// Nothing more is needed: the exit code, and why.
    End(u8, String),
}

/// A connection whose ends have shown each other that they know the secret.
pub(super) struct Call {
    pub(super) stream: TcpStream,
    key: Key,
}

/// What a message is sealed as: neither end can be told its own words.
const CALLER: &str = "caller";
const ORDER: &str = "order";

/// Calls the front at `HOST:PORT`.
///
/// # Errors
/// Nobody is there, or somebody who does not know the secret.
pub(super) fn call(front: &str, secret: &Secret, caller: &Caller) -> Result<Call> {
    let call = meet(front, secret)?;
    call.say(CALLER, caller)?;
    Ok(call)
}

/// Finds out whether who listens at `HOST:PORT` knows the secret, and hangs up.
///
/// # Errors
/// Nobody is there, or somebody who does not know it.
pub(super) fn meet(front: &str, secret: &Secret) -> Result<Call> {
    let until = Instant::now() + PATIENCE;
    let stream = connect(front)?;
    let mut timed = Timed::new(&stream, until.saturating_duration_since(Instant::now()))?;
    let version = (Purpose::Launcher, VERSION);
    let key = handshake::as_rank(&mut timed, secret, version)?;
    timed.lift()?;
    keep_alive(&stream)?;
    Ok(Call { stream, key })
}

/// Connects with one of the addresses of `HOST:PORT`, each of which has its share of the time: where packets are dropped no answer comes at all.
fn connect(front: &str) -> Result<TcpStream> {
    let addresses: Vec<_> = front.to_socket_addrs()?.collect();
    let mut last = Error::new(ErrorKind::NotFound, "the name has no address");
    for address in &addresses {
        match TcpStream::connect_timeout(address, PATIENCE / addresses.len() as u32) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// As [`call`] with the secret that this process has been told.
pub(super) fn call_as_told(front: &str, caller: &Caller) -> Result<Call> {
    let secret = given_secret(false).map_err(Error::other)?;
    call(
        front,
        &secret.ok_or_else(|| Error::other("there is no secret"))?,
        caller,
    )
}

/// What stands for ssh to a host that waits for the front at this address: runs a command there, whose stdin and stdout are those of this
/// process.
pub fn reach(front: &RendezvousAddress, host: &str, words: &[String]) -> ExitCode {
    let (host, command) = (host.to_string(), words.join(" "));
    let failed = format!("cannot reach host {host} through {front}");
    let called = call_as_told(&front.to_string(), &Caller::Shell { host, command });
    let passed = called.and_then(|call| {
        let (from, mut to) = (call.stream.try_clone()?, call.stream);
        // Without a buffer: what comes has no lines.
        let mut output = File::from(stdout().as_fd().try_clone_to_owned()?);
        thread::start(move || {
            // Its end is the end of what the command reads.
            let _ = copy(&mut stdin(), &mut to);
            let _ = to.shutdown(Shutdown::Write);
        });
        copy(&mut &from, &mut output)
    });
    match passed {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("{failed}: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// Answers a call: who it is, if that one knows the secret.
pub(super) fn answer(
    stream: TcpStream,
    secret: &Secret,
    limit: Duration,
) -> Result<(Caller, Call)> {
    let mut timed = Timed::new(&stream, limit)?;
    let (version, key) = handshake::as_server(&mut timed, secret, Purpose::Launcher)?;
    let call = Call { stream, key };
    if version != VERSION {
        let what = "the launcher that leads is of another version";
        Order::End(OTHER_VERSION_EXIT_CODE, what.to_string()).send(&call)?;
        let message = "it is no process of this version of the launcher";
        return Err(Error::new(ErrorKind::InvalidData, message));
    }
    let caller = call.hear(CALLER, &mut timed)?;
    timed.lift()?;
    keep_alive(&call.stream)?;
    Ok((caller, call))
}

impl Call {
    /// Says a message, sealed: its seal and its JSON.
    fn say(&self, kind: &str, message: &impl Serialize) -> Result<()> {
        let json = serde_json::to_vec(message)?;
        let frame = wire::frame(&self.key.seal(kind, &json), &json)?;
        (&self.stream).write_all(&frame)
    }

    fn hear<T: DeserializeOwned>(&self, kind: &str, from: &mut impl Read) -> Result<T> {
        let (seal, json): ([u8; 32], _) = wire::read(from, Limits::SEALED)?;
        if !self.key.is_seal(&seal, kind, &json) {
            let message = "what is said there is not from who has shown that it knows this run's secret: somebody passes words on";
            return Err(Error::new(ErrorKind::PermissionDenied, message));
        }
        Ok(serde_json::from_slice(&json)?)
    }
}

impl Order {
    /// Tells it to a host.
    pub(super) fn send(&self, host: &Call) -> Result<()> {
        host.say(ORDER, self)
    }

    /// Tells a host that there is none yet, and that this process lives.
    pub(super) fn send_none(host: &Call) -> Result<()> {
        host.say(ORDER, &None::<Self>)
    }

    /// Waits for the next word, at most so long: the order, or that there is none yet.
    pub(super) fn receive(front: &Call, limit: Duration) -> Result<Option<Self>> {
        let mut timed = Timed::new(&front.stream, limit)?;
        let order = front.hear(ORDER, &mut timed)?;
        timed.lift()?;
        Ok(order)
    }
}

/// Has the kernels ask each other whether they live: nobody else may say anything for hours. A host without power is noticed in 40 s.
fn keep_alive(stream: &TcpStream) -> Result<()> {
    setsockopt(stream, sockopt::KeepAlive, &true)?;
    setsockopt(stream, sockopt::TcpKeepIdle, &10)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &10)?;
    Ok(setsockopt(stream, sockopt::TcpKeepCount, &3)?)
}
