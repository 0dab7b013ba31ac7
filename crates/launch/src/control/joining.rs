//! How a rank finds rank 0 and is let in.

use std::io::{self, BufReader, ErrorKind, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::handshake::{self, Purpose};
use super::hello::Hello;
use super::link::Link;
use super::message::ToRank;
use super::wire::{self, Limits, Timed};
use super::{ControlConfig, listening};
use crate::{Error, Result};

/// How long one attempt to connect may take, and then whoever is there to show that it knows the secret.
const CONNECT: Duration = Duration::from_secs(2);

/// How long a rank insists when it is told that another run is at the address: that run may be about to end.
const OTHER_RUN: Duration = Duration::from_secs(10);

/// What ranks wait beyond their time for rank 0 to say who is missing.
const LAST_WORD: Duration = Duration::from_secs(2);

/// Rank 0's place.
pub(super) enum Place {
    /// It is to serve here.
    Listener(TcpListener),
    /// Somebody else serves already, and took it for a rank of the run.
    Link(Arc<Link>),
}

/// Takes the meeting point for rank 0. Who has its port already is asked for this run, which refuses a second rank 0 by name.
pub(super) fn claim(config: &ControlConfig) -> Result<Place> {
    persist(config, |attempt| match listen(config)? {
        Some(listener) => Ok(Place::Listener(listener)),
        None => match attempt.run(None) {
            Err(Refused::Io(error)) => Err(Refused::OtherRun(format!(
                "another program listens there ({error})"
            ))),
            other => other.map(Place::Link),
        },
    })
}

/// Connects to the server at `address`, or at the meeting point, and waits until all ranks are there.
pub(super) fn connect(config: &ControlConfig, address: Option<SocketAddr>) -> Result<Arc<Link>> {
    persist(config, |attempt| attempt.run(address))
}

/// Tries until the time to join is over.
fn persist<T>(
    config: &ControlConfig,
    mut run: impl FnMut(&mut Attempt) -> std::result::Result<T, Refused>,
) -> Result<T> {
    let begun = Instant::now();
    let mut pause = Duration::from_millis(20);
    let mut attempt = Attempt {
        config,
        until: begun + config.join_timeout + LAST_WORD,
        missing: Vec::new(),
    };
    loop {
        let last = match run(&mut attempt) {
            Ok(done) => return Ok(done),
            Err(Refused::ForGood(message)) => return Err(Error::Join(message)),
            Err(Refused::CannotStart(message)) => return Err(Error::CannotStart(message)),
            Err(Refused::OtherRun(message)) if begun.elapsed() > OTHER_RUN => {
                return Err(not_this_run(config, &message));
            }
            Err(Refused::OtherRun(message)) => message,
            Err(Refused::Io(error)) => error.to_string(),
        };
        if begun.elapsed() > config.join_timeout {
            return Err(overdue(config, &last, &attempt.missing));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_secs(1));
    }
}

/// A listener at the meeting point; `None` if the port is taken.
fn listen(config: &ControlConfig) -> std::result::Result<Option<TcpListener>, Refused> {
    let (host, port) = &config.master;
    match listening::listen(host, &resolve(config)?, config.is_one_host) {
        Ok(listener) => Ok(Some(listener)),
        Err(error) if error.kind() == ErrorKind::AddrInUse => Ok(None),
        Err(error) => Err(Refused::ForGood(format!(
            "rank 0 on host {} cannot listen on {host}:{port}: {error}\n\
             hint: choose another port with MASTER_PORT, the same on all ranks",
            config.host
        ))),
    }
}

enum Refused {
    /// Not let in, and never will be.
    ForGood(String),
    /// Nobody is let in.
    CannotStart(String),
    /// By what seems to be another run.
    OtherRun(String),
    Io(io::Error),
}

impl From<io::Error> for Refused {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

struct Attempt<'a> {
    config: &'a ControlConfig,
    until: Instant,
    /// Who was missing when rank 0 last said so.
    missing: Vec<usize>,
}

impl Attempt<'_> {
    /// Tries the server at `address`, or at each address of the meeting point.
    fn run(&mut self, address: Option<SocketAddr>) -> std::result::Result<Arc<Link>, Refused> {
        let addresses = match address {
            Some(address) => vec![address],
            None => resolve(self.config)?,
        };
        let no_address = io::Error::new(ErrorKind::NotFound, "the name has no address");
        let mut refused = Refused::Io(no_address);
        for address in addresses {
            match self.meet(&address) {
                Err(error @ (Refused::Io(_) | Refused::OtherRun(_))) => refused = error,
                met => return met,
            }
        }
        Err(refused)
    }

    fn meet(&mut self, address: &SocketAddr) -> std::result::Result<Arc<Link>, Refused> {
        let mut stream = TcpStream::connect_timeout(address, CONNECT)?;
        stream.set_nodelay(true)?;
        let mut timed = Timed::new(stream.try_clone()?, CONNECT);
        let version = (Purpose::Control, wire::VERSION);
        if handshake::as_rank(&mut timed, &self.config.secret, version)?.is_none() {
            return Err(Refused::OtherRun(
                "who listens there does not know this run's secret: it is another run, or another program".into(),
            ));
        }
        stream.write_all(&wire::frame(&Hello::new(self.config), &[])?)?;
        timed.extend(self.until.saturating_duration_since(Instant::now()));
        let mut reader = BufReader::new(timed);
        loop {
            match wire::read(&mut reader, Limits::RANK)?.0 {
                ToRank::Waiting { missing } => self.missing = missing,
                ToRank::Welcome { host } => {
                    reader.get_mut().lift()?;
                    return Ok(Link::start(self.config, host, reader, stream)?);
                }
                ToRank::Refused {
                    message,
                    retry,
                    all,
                } => {
                    return Err(match (retry, all) {
                        (true, _) => Refused::OtherRun(message),
                        (false, true) => Refused::CannotStart(message),
                        (false, false) => Refused::ForGood(message),
                    });
                }
                other => {
                    let message = format!("unexpected in a rendezvous: {other:?}");
                    return Err(io::Error::new(ErrorKind::InvalidData, message).into());
                }
            }
        }
    }
}

/// The addresses of the meeting point.
fn resolve(config: &ControlConfig) -> io::Result<Vec<SocketAddr>> {
    let (host, port) = &config.master;
    Ok((host.as_str(), *port).to_socket_addrs()?.collect())
}

fn not_this_run(config: &ControlConfig, why: &str) -> Error {
    let (host, port) = &config.master;
    Error::Join(format!(
        "rank {} on host {} could not join the run at {host}:{port}: {why}\n\
         hint: choose another port with MASTER_PORT, the same on all ranks; if there is one run only, its ranks were given \
         different secrets (CANDLE_TRAIN_RUN_TOKEN, CANDLE_TRAIN_RUN_TOKEN_FILE)",
        config.rank, config.host
    ))
}

fn overdue(config: &ControlConfig, last: &str, missing: &[usize]) -> Error {
    let (host, port) = &config.master;
    let missing = match missing {
        [] => String::new(),
        ranks => format!("; when it was last reached, these ranks were missing: {ranks:?}"),
    };
    Error::Join(format!(
        "rank {} on host {} could not join the run at {host}:{port} within {} s: {last}{missing}\n\
         hint: rank 0 must run on that host and its port must be reachable (firewall); set MASTER_ADDR and MASTER_PORT to \
         the same values on all ranks",
        config.rank,
        config.host,
        config.join_timeout.as_secs_f64()
    ))
}
