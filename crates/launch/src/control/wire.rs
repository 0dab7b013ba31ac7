//! Bytes on the control connection, after the [handshake](super::handshake): frames.
//!
//! A frame is `u32 json_len, u32 body_len` (little endian), a message as JSON, and bytes that belong to it. This and the fields of
//! [`Hello`](super::message::Hello) never change, so that ranks of different versions can tell each other so.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::spawn;

/// The version of the messages.
pub(super) const VERSION: u32 = 5;

/// How much a frame may hold.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    json: u32,
    body: u32,
}

impl Limits {
    /// From somebody who is not in.
    pub(crate) const STRANGER: Self = Self {
        json: 1 << 20,
        body: 0,
    };
    /// From somebody whose messages are sealed: the seal, and the message as bytes.
    pub(crate) const SEALED: Self = Self {
        json: 1 << 8,
        body: 1 << 20,
    };
    /// From a rank.
    pub(crate) const RANK: Self = Self {
        json: 1 << 24,
        body: 1 << 30,
    };
}

/// A frame's bytes.
pub(crate) fn frame(message: &impl Serialize, body: &[u8]) -> Result<Vec<u8>> {
    let json = serde_json::to_vec(message)?;
    let len = |what: &str, len: usize, limit: u32| match u32::try_from(len) {
        Ok(short) if short <= limit => Ok(short.to_le_bytes()),
        _ => Err(invalid(format!("{what} of {len} bytes, at most {limit}"))),
    };
    let json_len = len("a message", json.len(), Limits::RANK.json)?;
    let body_len = len("a body", body.len(), Limits::RANK.body)?;
    Ok([json_len.as_slice(), &body_len, &json, body].concat())
}

/// Reads a frame.
pub(crate) fn read<T: DeserializeOwned>(
    reader: &mut impl Read,
    limits: Limits,
) -> Result<(T, Vec<u8>)> {
    let (json_len, body_len) = (read_u32(reader)?, read_u32(reader)?);
    if json_len > limits.json || body_len > limits.body {
        return Err(invalid(format!(
            "a frame of {json_len} and {body_len} bytes, at most {} and {}",
            limits.json, limits.body
        )));
    }
    let message = serde_json::from_slice(&read_bytes(reader, json_len)?)?;
    Ok((message, read_bytes(reader, body_len)?))
}

/// Memory grows with what arrives, not with what was announced.
fn read_bytes(reader: &mut impl Read, len: u32) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    reader.take(u64::from(len)).read_to_end(&mut bytes)?;
    if bytes.len() < len as usize {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok(bytes)
}

fn read_u32(reader: &mut impl Read) -> Result<u32> {
    let mut bytes = [0; 4];
    reader.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidData, message)
}

/// A connection read until an instant, however slowly the bytes trickle in.
pub(crate) struct Timed {
    stream: TcpStream,
    until: Option<Instant>,
}

impl Timed {
    /// On it, what is small goes at once.
    pub(crate) fn new(stream: &TcpStream, limit: Duration) -> Result<Self> {
        stream.set_nodelay(true)?;
        let (stream, until) = (stream.try_clone()?, Some(Instant::now() + limit));
        Ok(Self { stream, until })
    }

    /// From now on reads may last until then.
    pub(super) fn extend(&mut self, limit: Duration) {
        self.until = Some(Instant::now() + limit);
    }

    /// From now on reads may last.
    pub(crate) fn lift(&mut self) -> Result<()> {
        self.until = None;
        self.stream.set_read_timeout(None)
    }
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        if let Some(until) = self.until {
            let rest = until.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            self.stream.set_read_timeout(Some(rest))?;
        }
        self.stream.read(buffer)
    }
}

impl Write for Timed {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> Result<()> {
        self.stream.flush()
    }
}

/// The way out of a connection: a thread writes what is put there, so that nobody waits for an end that does not read.
pub(super) struct Outbox(Sender<Arc<Vec<u8>>>);

impl Outbox {
    /// Writes until this is dropped or the connection breaks, and then closes the connection.
    pub(super) fn start(mut stream: TcpStream) -> Result<Self> {
        let (queue, frames) = channel::<Arc<Vec<u8>>>();
        spawn("control-write", move || {
            for frame in frames {
                if stream.write_all(&frame).is_err() {
                    break;
                }
            }
            // Nothing to do about a connection that is closed already.
            let _ = stream.shutdown(Shutdown::Both);
        })?;
        Ok(Self(queue))
    }

    /// # Errors
    /// A message that is too long for a frame.
    pub(super) fn send(&self, message: &impl Serialize, body: &[u8]) -> Result<()> {
        self.put(Arc::new(frame(message, body)?));
        Ok(())
    }

    /// A message for which nobody waits.
    pub(super) fn tell(&self, message: &impl Serialize) {
        if let Err(error) = self.send(message, &[]) {
            tracing::error!("a message between the ranks was not sent: {error}");
        }
    }

    pub(super) fn put(&self, frame: Arc<Vec<u8>>) {
        // The thread that reads finds out that a connection has closed.
        let _ = self.0.send(frame);
    }
}
