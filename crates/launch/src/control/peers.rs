//! Connections between ranks beside the star: what is large need not pass through rank 0.
//!
//! The first ranks of a run listen, each at a port of the address from which it speaks to rank 0; every rank connects to those before
//! it. Their addresses go by way of rank 0. Both ends show that they know the secret as they do on the way to rank 0
//! ([`handshake`](super::handshake)); then the one that has come says its rank and is answered by one byte.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::ops::Range;
use std::sync::{Arc, mpsc};
use std::thread::Builder;
use std::time::{Duration, Instant};

use super::server::Strangers;
use super::wire::{self, Timed};
use super::{Control, ControlConfig, handshake};
use crate::{Error, Result, Secret};

/// How long one attempt to connect may take, and whoever has come to say who it is.
const HANDSHAKE: Duration = Duration::from_secs(2);

/// How often the listener looks who has come.
const LOOK: Duration = Duration::from_millis(2);

/// What a rank that is let in is answered.
const WELCOME: u8 = 1;

impl Control {
    /// Connects this rank with the first `num_serving` ranks, and these with all others: a stream to each rank that it is connected
    /// with now, by rank. All ranks must call it, with the configuration by which they joined.
    ///
    /// # Errors
    /// A rank failed, died or left; a rank that does not come, or cannot be reached, in the time to join.
    pub fn connect_peers(
        &self,
        config: &ControlConfig,
        num_serving: usize,
    ) -> Result<Vec<Option<TcpStream>>> {
        let (rank, world_size) = (config.rank, config.world_size);
        let until = Instant::now() + config.join_timeout;
        let unable = |error: io::Error| {
            Error::Join(format!(
                "rank {rank} on host {} cannot be connected with the other ranks: {error}",
                config.host
            ))
        };
        let serves = rank < num_serving && rank + 1 < world_size;
        let listener = serves.then(|| self.listen_for_peers()).transpose();
        let listener = listener.map_err(unable)?;
        let own = listener.as_ref().map(TcpListener::local_addr).transpose();
        let own = own.map_err(unable)?.map(|address| address.to_string());
        let said = self.gather(
            "addresses of the ranks that serve",
            own.unwrap_or_default().as_bytes(),
        )?;
        let before = 0..rank.min(num_serving);
        let streams = std::thread::scope(|scope| {
            let accepting = listener.as_ref().map(|listener| {
                let expected = rank + 1..world_size;
                scope.spawn(move || accept(listener, &config.secret, expected, until))
            });
            let mut streams = BTreeMap::new();
            for peer in before {
                let addresses = addresses_of(config, (peer, &said[peer]));
                let stream = addresses.and_then(|addresses| {
                    connect(&addresses, config, until).map_err(|error| {
                        let message = format!("rank {peer} at {addresses:?}: {error}");
                        io::Error::new(error.kind(), message)
                    })
                });
                streams.insert(peer, stream.map_err(unable)?);
            }
            if let Some(accepting) = accepting {
                let accepted = accepting.join();
                let accepted =
                    accepted.unwrap_or_else(|_| Err(io::Error::other("its listener panicked")));
                streams.extend(accepted.map_err(unable)?);
            }
            Ok::<_, Error>((0..world_size).map(|peer| streams.remove(&peer)).collect())
        })?;
        // Who is connected expects to hear of the others, which they do not say before they are.
        self.gather("connected", b"")?;
        Ok(streams)
    }

    /// A listener at a free port of the address from which this rank speaks to rank 0; on rank 0 where it serves.
    fn listen_for_peers(&self) -> io::Result<TcpListener> {
        let address = match &self.server {
            Some(server) => server.address(),
            None => self.link.local_address()?,
        };
        TcpListener::bind((address.ip(), 0))
    }
}

/// Where a rank listens that has said this.
fn addresses_of(
    config: &ControlConfig,
    (rank, said): (usize, &[u8]),
) -> io::Result<Vec<SocketAddr>> {
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

/// A connection to a rank that listens at one of these addresses.
fn connect(
    addresses: &[SocketAddr],
    config: &ControlConfig,
    until: Instant,
) -> io::Result<TcpStream> {
    loop {
        let mut last = io::Error::new(ErrorKind::NotFound, "no address");
        for address in addresses {
            match introduce(address, config) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        // Others may have kept it so busy that it hung up.
        if Instant::now() > until || last.kind() == ErrorKind::PermissionDenied {
            return Err(last);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn introduce(address: &SocketAddr, config: &ControlConfig) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(address, HANDSHAKE)?;
    stream.set_nodelay(true)?;
    let mut timed = Timed::new(stream.try_clone()?, HANDSHAKE);
    let version = (handshake::Purpose::Peers, wire::VERSION);
    if handshake::as_rank(&mut timed, &config.secret, version)?.is_none() {
        let message = "who listens there does not know this run's secret";
        return Err(io::Error::new(ErrorKind::PermissionDenied, message));
    }
    timed.write_all(&(config.rank as u64).to_le_bytes())?;
    let mut answer = [0];
    timed.read_exact(&mut answer)?;
    timed.lift()?;
    match answer {
        [WELCOME] => Ok(stream),
        _ => Err(ErrorKind::InvalidData.into()),
    }
}

/// Connections from all `expected` ranks; whoever else comes is turned away, and keeps none of them out.
fn accept(
    listener: &TcpListener,
    secret: &Secret,
    expected: Range<usize>,
    until: Instant,
) -> io::Result<BTreeMap<usize, TcpStream>> {
    listener.set_nonblocking(true)?;
    let strangers = Arc::new(Strangers::new(expected.end));
    let (met, arrived) = mpsc::channel::<(usize, TcpStream)>();
    let mut streams = BTreeMap::new();
    let mut number = 0;
    loop {
        for (rank, stream) in arrived.try_iter() {
            streams.insert(rank, stream);
        }
        let mut missing = expected.clone().filter(|rank| !streams.contains_key(rank));
        let Some(first_missing) = missing.next() else {
            return Ok(streams);
        };
        if Instant::now() > until {
            let others = missing.count();
            let message = format!("rank {first_missing} and {others} others did not come");
            return Err(io::Error::new(ErrorKind::TimedOut, message));
        }
        let Ok((stream, _)) = listener.accept() else {
            std::thread::sleep(LOOK);
            continue;
        };
        strangers.add(number, stream.try_clone()?);
        let (here, secret, met) = (strangers.clone(), secret.clone(), met.clone());
        let expected = expected.clone();
        let spawned = Builder::new().name("peer-meet".into()).spawn(move || {
            let known = meet(stream, &secret, &expected);
            here.remove(number);
            match known {
                // Nobody listens any more when all are there.
                Ok(known) => drop(met.send(known)),
                Err(error) => tracing::debug!("refused a connection of a peer: {error}"),
            }
        });
        if spawned.is_err() {
            strangers.remove(number);
        }
        number += 1;
    }
}

/// Finds out which rank has connected.
fn meet(
    stream: TcpStream,
    secret: &Secret,
    expected: &Range<usize>,
) -> io::Result<(usize, TcpStream)> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    let mut timed = Timed::new(stream.try_clone()?, HANDSHAKE);
    handshake::as_server(&mut timed, secret, handshake::Purpose::Peers)?;
    let mut rank = [0; 8];
    timed.read_exact(&mut rank)?;
    let rank = usize::try_from(u64::from_le_bytes(rank)).unwrap_or(usize::MAX);
    if !expected.contains(&rank) {
        let message = format!("rank {rank}, expected one of {expected:?}");
        return Err(io::Error::new(ErrorKind::InvalidData, message));
    }
    timed.write_all(&[WELCOME])?;
    timed.lift()?;
    Ok((rank, stream))
}
