//! A connection to a rank of another process.

use std::io::{BufReader, ErrorKind, Result};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::thread::Builder;
use std::time::Duration;

use super::inbox::Inbox;
use super::wire::Frame;
use super::{Departure, MOMENT, Mail, MailboxConfig};

/// The stack of a thread that moves messages.
const STACK_BYTES: usize = 256 << 10;

/// A connection to a rank of another process: one thread reads, another says now and then that this rank is alive, and whoever sends
/// writes.
pub(super) struct Connection {
    pub peer: usize,
    stream: Mutex<TcpStream>,
    /// The same stream, to be closed whoever writes.
    closing: TcpStream,
    is_closed: AtomicBool,
}

impl Connection {
    /// Takes over a stream to rank `peer`. What comes goes to `inbox`; a peer of which nothing comes for `silence` is gone, and so is one that
    /// takes nothing for `deadline`.
    pub fn start(
        peer: usize,
        stream: TcpStream,
        inbox: &Arc<Inbox>,
        &MailboxConfig {
            silence, deadline, ..
        }: &MailboxConfig,
    ) -> Result<Arc<Self>> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(silence))?;
        stream.set_write_timeout(Some(deadline))?;
        let reader = BufReader::new(stream.try_clone()?);
        let connection = Arc::new(Self {
            peer,
            closing: stream.try_clone()?,
            stream: Mutex::new(stream),
            is_closed: AtomicBool::new(false),
        });
        let spawn = |name: &str| {
            let builder = Builder::new().name(format!("{name}-{peer}"));
            builder.stack_size(STACK_BYTES)
        };
        let (reading, inbox) = (connection.clone(), inbox.clone());
        spawn("mail-read").spawn(move || reading.listen(reader, &inbox, silence))?;
        let beating = connection.clone();
        let interval = (silence / 8).max(Duration::from_millis(10));
        spawn("mail-beat").spawn(move || {
            while !beating.is_closed.load(Ordering::Acquire) && beating.beat() {
                std::thread::sleep(interval);
            }
            // A part of a beat may be there: nothing can follow.
            beating.close();
        })?;
        Ok(connection)
    }

    /// Sends a message or another frame; returns when the last byte of it is on its way.
    pub fn send(&self, frame: &Frame) -> Result<()> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = frame.write(&mut *stream);
        drop(stream);
        if sent.is_err() {
            // A part of it may be there: nothing can follow.
            self.close();
        }
        sent
    }

    /// Says that nothing will come any more, in this time; false if somebody is writing, perhaps to a peer that does not read.
    pub fn try_farewell(&self, farewell: &Frame, limit: Duration) -> bool {
        let mut stream = match self.stream.try_lock() {
            Ok(stream) => stream,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        let said = stream
            .set_write_timeout(Some(limit.max(MOMENT)))
            .and_then(|()| farewell.write(&mut *stream));
        if said.is_err() {
            self.close();
        }
        true
    }

    /// Ends the connection; what was sent before may be lost.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        // Nothing to do about one that is closed already.
        let _ = self.closing.shutdown(Shutdown::Both);
    }

    /// Says that this rank is alive, unless something else is being said; false if nobody hears it.
    fn beat(&self) -> bool {
        let stream = self.stream.try_lock();
        stream.map_or(true, |mut stream| Frame::Beat.write(&mut *stream).is_ok())
    }

    fn listen(&self, mut reader: BufReader<TcpStream>, inbox: &Inbox, silence: Duration) {
        let rank = self.peer;
        let error = loop {
            // A peer whose messages are not taken need not be heard.
            inbox.wait_for_room(rank, Duration::MAX);
            match Frame::read(&mut reader, || inbox.largest_tensor.load(Ordering::Acquire)) {
                Ok(Frame::Beat) => {}
                Ok(Frame::Mail(tag, tensors)) => inbox.put(Mail {
                    from: rank,
                    tag,
                    tensors,
                }),
                Ok(Frame::Farewell { why, because_of }) => {
                    inbox.note_departure(Departure {
                        rank,
                        why,
                        because_of: because_of.map(Box::new),
                    });
                    if self.send(&Frame::Noted).is_err() {
                        break ErrorKind::ConnectionReset.into();
                    }
                }
                Ok(Frame::Noted) => inbox.note_farewell(rank),
                Err(error) => break error,
            }
        };
        let why = Some(match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                let secs = silence.as_secs_f64();
                format!(
                    "nothing was heard of it for {secs} s\nhint: its process is stopped, its host is down or the network between \
                     the hosts is cut"
                )
            }
            ErrorKind::InvalidData => format!("it sent what is no message ({error})"),
            _ => "it died: its connection closed without a farewell".to_string(),
        });
        // Before whoever is blocked in a write to the peer is woken, and asks why.
        inbox.note_departure(Departure {
            rank,
            why,
            because_of: None,
        });
        self.close();
    }
}
