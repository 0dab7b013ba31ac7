//! What front and agent say to each other: one line of JSON each, and after a line about output its bytes.

use std::io::{BufRead, Error, ErrorKind, Read, Write};

use serde::{Deserialize, Serialize};

use super::end::End;
use super::host_plan::HostPlan;

/// The agent's first line. What comes before it is the greeting of a remote shell.
pub(super) const GREETING: &str = concat!("candle-train agent ", env!("CARGO_PKG_VERSION"));

/// A line is no longer than this: a plan holds a command line and an environment.
const MAX_LINE: u64 = 1 << 24;
/// What an agent reads of a rank's output at once.
pub(super) const MAX_OUTPUT: usize = 1 << 16;

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
    /// A rank wrote; `num_bytes` bytes follow the line.
    Output {
        rank: usize,
        stream: Stream,
        num_bytes: usize,
    },
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

/// Writes a message as one line, with `bytes` after it, and flushes.
pub(super) fn send(
    to: &mut impl Write,
    message: &impl Serialize,
    bytes: &[u8],
) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    line.extend_from_slice(bytes);
    to.write_all(&line)?;
    to.flush()
}

/// Reads one message; `None` at the end of the stream. A line that is too long is no whole message.
pub(super) fn receive<T: for<'de> Deserialize<'de>>(
    from: &mut impl BufRead,
) -> std::io::Result<Option<T>> {
    let mut line = Vec::new();
    from.take(MAX_LINE).read_until(b'\n', &mut line)?;
    if line.is_empty() {
        return Ok(None);
    }
    Ok(Some(serde_json::from_slice(&line)?))
}

/// Reads the bytes that follow a line about output.
pub(super) fn receive_bytes(from: &mut impl Read, num_bytes: usize) -> std::io::Result<Vec<u8>> {
    if num_bytes > MAX_OUTPUT {
        let message = format!("{num_bytes} bytes of output at once, at most {MAX_OUTPUT}");
        return Err(Error::new(ErrorKind::InvalidData, message));
    }
    let mut bytes = vec![0; num_bytes];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}
