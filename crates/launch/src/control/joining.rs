//! How a rank finds rank 0, or becomes it, and is let in.

use std::io::{self, BufReader, ErrorKind, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::handshake::{self, Purpose};
use super::link::Link;
use super::message::{Hello, ToRank};
use super::server::{Server, rank_list};
use super::wire::{self, Limits, Timed};
use super::{ControlConfig, FAREWELL, listening};
use crate::{Error, Result, SpokenWait};

/// How long one attempt to connect may take, and then whoever is there to show that it knows the secret.
const CONNECT: Duration = Duration::from_secs(2);

/// How long a rank insists when another run is at the address: that run may be about to end.
const OTHER_RUN: Duration = Duration::from_secs(10);

/// What ranks wait beyond their time for rank 0 to say who is missing.
const LAST_WORD: Duration = Duration::from_secs(2);

/// Joins the run and waits until all ranks are there; rank 0 serves it, at the listener or at the meeting point. If another process
/// does that already it is asked for this run, and refuses a second rank 0 by name.
pub(super) fn join(
    config: &ControlConfig,
    listener: Option<TcpListener>,
) -> Result<(Arc<Link>, Option<Server>)> {
    let server = listener.map(|listener| serve(config, listener));
    let mut joining = Joining {
        config,
        begun: Instant::now(),
        server: server.transpose()?,
        missing: Vec::new(),
        wait: SpokenWait::begin(
            config.wait_notices,
            &format!("rank {} on host {}", config.rank, config.host),
        ),
    };
    match joining.persist() {
        Ok(link) => Ok((link, joining.server)),
        Err(error) => {
            if let Some(server) = &joining.server {
                server.wait_until_known(FAREWELL);
            }
            Err(error)
        }
    }
}

fn serve(config: &ControlConfig, listener: TcpListener) -> Result<Server> {
    let warned = match config.is_guessable && config.world_size > 1 {
        true => listening::warn_of_guesses(&listener),
        false => Ok(()),
    };
    warned
        .and_then(|()| Server::start(listener, config))
        .map_err(|error| Error::Join(format!("rank 0 cannot serve the other ranks: {error}")))
}

struct Joining<'a> {
    config: &'a ControlConfig,
    begun: Instant,
    /// On rank 0, once it has the meeting point.
    server: Option<Server>,
    /// Who was missing when rank 0 last said so.
    missing: Vec<usize>,
    wait: SpokenWait,
}

impl Joining<'_> {
    /// Tries until the time to join is over.
    fn persist(&mut self) -> Result<Arc<Link>> {
        let mut pause = Duration::from_millis(20);
        let (host, port) = &self.config.master;
        self.wait.say(format!("for rank 0 at {host}:{port}"));
        loop {
            let last = match self.attempt() {
                Ok(met) => return met,
                Err(error) => error,
            };
            self.wait
                .say(format!("for rank 0 at {host}:{port} ({last})"));
            let (time, limit) = (self.begun.elapsed(), self.config.join_timeout);
            if last.kind() == ErrorKind::PermissionDenied && time > OTHER_RUN {
                return Err(self.failed(&format!(
                    ": {last}\n\
                     hint: choose another port with MASTER_PORT, the same on all ranks; if there is one run only, its ranks were \
                     given different secrets (CANDLE_TRAIN_RUN_TOKEN, CANDLE_TRAIN_RUN_TOKEN_FILE)"
                )));
            }
            if time > limit {
                let missing = match self.missing.as_slice() {
                    [] => String::new(),
                    ranks => {
                        format!("; when it was last reached, these ranks were missing: {ranks:?}")
                    }
                };
                return Err(self.failed(&format!(
                    " within {} s: {last}{missing}\n\
                     hint: rank 0 must run on that host and its port must be reachable (firewall); set MASTER_ADDR and \
                     MASTER_PORT to the same values on all ranks",
                    limit.as_secs_f64()
                )));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_secs(1));
        }
    }

    /// Tries each address of the meeting point, which rank 0 takes if it is free. The inner error is for good; the outer one may pass, and
    /// is [`ErrorKind::PermissionDenied`] where another run seems to be.
    fn attempt(&mut self) -> io::Result<Result<Arc<Link>>> {
        let (host, port) = &self.config.master;
        let resolve =
            || io::Result::<Vec<_>>::Ok((host.as_str(), *port).to_socket_addrs()?.collect());
        if self.config.rank == 0 && self.server.is_none() {
            match self.listen(&resolve()?) {
                Ok(server) => self.server = server,
                Err(error) => return Ok(Err(error)),
            }
        }
        let addresses = match &self.server {
            Some(server) => vec![server.serving.local_address()],
            None => resolve()?,
        };
        let mut last = io::Error::new(ErrorKind::NotFound, "the name has no address");
        for address in addresses {
            match self.meet(&address) {
                Err(error) => last = error,
                met => return met,
            }
        }
        let is_other_run = last.kind() == ErrorKind::PermissionDenied;
        if self.config.rank == 0 && self.server.is_none() && !is_other_run {
            let message = format!("another program listens there ({last})");
            last = io::Error::new(ErrorKind::PermissionDenied, message);
        }
        Err(last)
    }

    /// Serves the run at the meeting point, unless its port is taken.
    fn listen(&self, addresses: &[SocketAddr]) -> Result<Option<Server>> {
        let (host, port) = &self.config.master;
        match listening::listen(host, addresses, self.config.is_one_host) {
            Ok(listener) => serve(self.config, listener).map(Some),
            Err(error) if error.kind() == ErrorKind::AddrInUse => Ok(None),
            Err(error) => Err(Error::Join(format!(
                "rank 0 on host {} cannot listen on {host}:{port}: {error}\n\
                 hint: choose another port with MASTER_PORT, the same on all ranks",
                self.config.host
            ))),
        }
    }

    fn meet(&mut self, address: &SocketAddr) -> io::Result<Result<Arc<Link>>> {
        let mut stream = TcpStream::connect_timeout(address, CONNECT)?;
        let mut timed = Timed::new(&stream, CONNECT)?;
        let version = (Purpose::Control, wire::VERSION);
        handshake::as_rank(&mut timed, &self.config.secret, version)?;
        stream.write_all(&wire::frame(&Hello::new(self.config), &[])?)?;
        let limit = self.config.join_timeout + LAST_WORD;
        let mut reader = BufReader::new(timed);
        loop {
            // Rank 0 says several times a second who is missing.
            let rest = limit.saturating_sub(self.begun.elapsed());
            reader.get_mut().extend(rest.min(self.config.rank_timeout));
            match wire::read(&mut reader, Limits::RANK)?.0 {
                ToRank::Waiting { missing } => self.wait_for(missing),
                ToRank::Welcome { host } => {
                    reader.get_mut().lift()?;
                    return Ok(Ok(Link::start(self.config, host, reader, stream)?));
                }
                ToRank::Refused { message, all } => {
                    return Ok(Err(match all {
                        true => Error::CannotStart(message),
                        false => Error::Join(message),
                    }));
                }
                other => {
                    let message = format!("unexpected in a rendezvous: {other:?}");
                    return Err(io::Error::new(ErrorKind::InvalidData, message));
                }
            }
        }
    }

    /// These ranks have not come. On one host rank 0 alone says so.
    fn wait_for(&mut self, missing: Vec<usize>) {
        let (host, port) = &self.config.master;
        let is_to_say = self.config.rank == 0 || !self.config.is_one_host;
        self.wait.say(match is_to_say && !missing.is_empty() {
            true => format!("at {host}:{port} for {}", rank_list(&missing)),
            false => String::new(),
        });
        self.missing = missing;
    }

    fn failed(&self, how: &str) -> Error {
        let ControlConfig { rank, host, .. } = self.config;
        let (master, port) = &self.config.master;
        Error::Join(format!(
            "rank {rank} on host {host} could not join the run at {master}:{port}{how}"
        ))
    }
}
