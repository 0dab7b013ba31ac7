//! What front and agent say to each other, in the [frames](crate::control::wire) of the ranks.

use std::io::{ErrorKind, Read, Result, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::end::End;
use super::host_plan::HostPlan;
use crate::control::wire::{Limits, frame, read};

/// The agent's first line. What comes before it is the greeting of a remote shell.
pub(super) const GREETING: &str = concat!("candle-train agent ", env!("CARGO_PKG_VERSION"));

/// How often each side says that it lives.
pub(super) const ALIVE_INTERVAL: Duration = Duration::from_secs(1);

/// From the front to an agent.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Command {
    /// What to run; the agent checks it and answers [`Report::Ready`] or [`Report::Refused`].
    Plan(HostPlan),
    /// Start the ranks.
    Start,
    /// Send this signal to the ranks.
    Signal(i32),
    /// End the ranks: SIGTERM, and SIGKILL after the grace time.
    Stop { grace_ms: u64 },
    /// The front lives.
    Alive,
}

/// From an agent to the front.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Report {
    /// The plan can be run on this host.
    Ready,
    /// It cannot, for this reason.
    Refused(String),
    /// A rank wrote the bytes of this frame.
    Output { rank: usize, stream: Stream },
    /// A rank ended, this long ago: its output may come late.
    Ended {
        rank: usize,
        pid: i32,
        end: End,
        ms_ago: u64,
    },
    /// These processes outlived SIGKILL.
    Survivors(Vec<i32>),
    /// All is over on this host.
    Finished,
    /// The agent lives.
    Alive,
}

/// Which of its two outputs a rank wrote to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Stream {
    Out,
    Err,
}

/// Writes a message and the bytes that belong to it.
pub(super) fn send(to: &mut impl Write, message: &impl Serialize, bytes: &[u8]) -> Result<()> {
    // In one piece: several threads may write.
    to.write_all(&frame(message, bytes)?)?;
    to.flush()
}

/// Writes what is posted, and between posts that this side lives, until nobody is left to post anything, or to read.
pub(super) fn write_posts<M: Serialize>(mut to: impl Write, posts: &Receiver<M>, alive: &M) {
    loop {
        let sent = match posts.recv_timeout(ALIVE_INTERVAL) {
            Ok(post) => send(&mut to, &post, &[]),
            Err(RecvTimeoutError::Timeout) => send(&mut to, alive, &[]),
            Err(RecvTimeoutError::Disconnected) => return,
        };
        if sent.is_err() {
            return;
        }
    }
}

/// Reads a message and its bytes; `None` at the end of the stream, whatever the other end had not read yet.
pub(super) fn receive<M: DeserializeOwned>(from: &mut impl Read) -> Result<Option<(M, Vec<u8>)>> {
    use ErrorKind::{ConnectionReset, UnexpectedEof};
    match read(from, Limits::RANK) {
        Err(error) if matches!(error.kind(), UnexpectedEof | ConnectionReset) => Ok(None),
        received => received.map(Some),
    }
}
