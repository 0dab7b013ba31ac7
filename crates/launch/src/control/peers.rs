//! Connections between ranks beside the star: what is large need not pass through rank 0.
//!
//! The first ranks of a run listen, each at a port of the address from which it speaks to rank 0; every rank connects to those before
//! it. Their addresses go by way of rank 0. Both ends show that they know the secret as they do on the way to rank 0
//! ([`handshake`](super::handshake)); then the one that has come says its rank and gets an empty answer.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::ops::Range;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use super::server::{HANDSHAKE, Serving, Strangers, allow_connections, rank_list};
use super::wire::{self, Limits, Timed};
use super::{Control, ControlConfig, handshake};
use crate::{Error, Result, Secret, SpokenWait};

/// Files of the connection of a peer: to read, to write, and to close it.
const FILES_OF_PEER: u64 = 3;

impl Control {
    /// Connects this rank with the first `num_serving` ranks, and these with all others: a stream to each rank that it is connected
    /// with now, by rank. All ranks must call it.
    ///
    /// # Errors
    /// A rank failed, died or left; a rank that does not come, or cannot be reached, in the time to join.
    pub fn connect_peers(&self, num_serving: usize) -> Result<Vec<Option<TcpStream>>> {
        let config = &self.link.config;
        let (rank, world_size) = (config.rank, config.world_size);
        let until = Instant::now() + config.join_timeout;
        let who = format!("rank {rank} on host {}", config.host);
        let wait = SpokenWait::begin(config.wait_notices, &who);
        let unable = |error: io::Error| {
            Error::Join(format!(
                "rank {rank} on host {} cannot be connected with the other ranks: {error}",
                config.host
            ))
        };
        let expected = match rank < num_serving {
            true => rank + 1..world_size,
            false => 0..0,
        };
        let (met, arrived) = channel();
        let serving = (!expected.is_empty()).then(|| self.serve_peers(expected.clone(), met));
        let serving = serving.transpose().map_err(unable)?;
        let own = serving.as_ref().map(|serving| serving.address.to_string());
        let said = self.gather(
            "addresses of the ranks that serve",
            own.unwrap_or_default().as_bytes(),
        )?;
        let mut streams = BTreeMap::new();
        for (peer, said) in said.iter().enumerate().take(rank.min(num_serving)) {
            wait.say(format!("for a connection to rank {peer}"));
            let stream = connect(peer, said, config, until);
            streams.insert(peer, stream.map_err(unable)?);
        }
        let missing = |streams: &BTreeMap<_, _>| {
            let missing = expected.clone().filter(|peer| !streams.contains_key(peer));
            missing.collect::<Vec<_>>()
        };
        while let missing @ [first, others @ ..] = missing(&streams).as_slice() {
            wait.say(format!("for connections of {}", rank_list(missing)));
            let rest = until.saturating_duration_since(Instant::now());
            let Ok((peer, stream)) = arrived.recv_timeout(rest) else {
                let message = format!("rank {first} and {} others did not come", others.len());
                return Err(unable(io::Error::new(ErrorKind::TimedOut, message)));
            };
            streams.insert(peer, stream);
        }
        wait.say(String::new());
        // Who is connected expects to hear of the others, which they do not say before they are.
        self.gather("connected", b"")?;
        // A rank that heard nothing in time has come again, and hung up where it was before.
        streams.extend(arrived.try_iter());
        Ok((0..world_size).map(|peer| streams.remove(&peer)).collect())
    }

    /// Serves the ranks that connect to this one, at a free port of the address from which it speaks to rank 0; on rank 0 where it serves.
    /// Whoever else comes is turned away, and keeps none of them out.
    fn serve_peers(
        &self,
        expected: Range<usize>,
        met: Sender<(usize, TcpStream)>,
    ) -> io::Result<Serving> {
        allow_connections(expected.len(), FILES_OF_PEER)?;
        let address = match &self.server {
            Some(server) => server.serving.address,
            None => self.link.local_address()?,
        };
        let listener = TcpListener::bind((address.ip(), 0))?;
        let secret = self.link.config.secret.clone();
        Strangers::serve(
            listener,
            expected.end,
            move |stream| meet(stream, &secret, &expected, &met),
            drop,
        )
    }
}

/// Where a rank listens that has said this.
fn addresses_of(config: &ControlConfig, rank: usize, said: &[u8]) -> io::Result<Vec<SocketAddr>> {
    let said = String::from_utf8_lossy(said);
    let address: SocketAddr = said.parse().map_err(|_| {
        let message = format!("rank {rank} says that it listens at {said:?}");
        io::Error::new(ErrorKind::InvalidData, message)
    })?;
    if rank > 0 || !address.ip().is_unspecified() {
        return Ok(vec![address]);
    }
    // It may listen at all of its addresses; the others know one.
    let host = config.master.0.as_str();
    Ok((host, address.port()).to_socket_addrs()?.collect())
}

/// A connection to a rank that has said where it listens.
fn connect(
    rank: usize,
    said: &[u8],
    config: &ControlConfig,
    until: Instant,
) -> io::Result<TcpStream> {
    let addresses = addresses_of(config, rank, said)?;
    loop {
        let mut last = io::Error::new(ErrorKind::NotFound, "no address");
        for address in &addresses {
            match introduce(address, config) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        // Others may have kept it so busy that it hung up.
        if Instant::now() > until || last.kind() == ErrorKind::PermissionDenied {
            let message = format!("rank {rank} at {addresses:?}: {last}");
            return Err(io::Error::new(last.kind(), message));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn introduce(address: &SocketAddr, config: &ControlConfig) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(address, HANDSHAKE)?;
    let mut timed = Timed::new(&stream, HANDSHAKE)?;
    let version = (handshake::Purpose::Peers, wire::VERSION);
    handshake::as_rank(&mut timed, &config.secret, version)?;
    timed.write_all(&wire::frame(&config.rank, &[])?)?;
    let ((), _) = wire::read(&mut timed, Limits::STRANGER)?;
    timed.lift()?;
    Ok(stream)
}

/// Finds out which rank has connected.
fn meet(
    stream: TcpStream,
    secret: &Secret,
    expected: &Range<usize>,
    met: &Sender<(usize, TcpStream)>,
) -> io::Result<()> {
    let mut timed = Timed::new(&stream, HANDSHAKE)?;
    handshake::as_server(&mut timed, secret, handshake::Purpose::Peers)?;
    let (rank, _) = wire::read::<usize>(&mut timed, Limits::STRANGER)?;
    if !expected.contains(&rank) {
        let message = format!("rank {rank}, expected one of {expected:?}");
        return Err(io::Error::new(ErrorKind::InvalidData, message));
    }
    timed.lift()?;
    // Before the answer, with which that rank goes on. Nobody listens any more when all are there.
    drop(met.send((rank, stream)));
    timed.write_all(&wire::frame(&(), &[])?)
}
