//! Rank 0's server: it lets the ranks in, answers them, and watches them.
//!
//! One thread per connection reads, another writes from a queue without bound, so that a slow rank stalls nobody.

mod admission;
mod exchange;
mod failures;
mod hub;
mod report;
pub(crate) mod strangers;

use std::io::{self, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Builder;
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{Backlog, listen as listen_again};

use super::ControlConfig;
use super::handshake::{self, Purpose};
use super::hello::Hello;
use super::message::FromRank;
use super::wire::{self, Limits, Timed};
use hub::Hub;
pub(super) use strangers::Strangers;

/// How long a stranger may take to say who it is.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(2);

/// The stack of a thread that moves messages.
const STACK_BYTES: usize = 256 << 10;

/// Rank 0's server. It runs until it is dropped.
pub(super) struct Server {
    hub: Arc<Hub>,
    address: SocketAddr,
    closed: Arc<AtomicBool>,
}

impl Server {
    /// Serves the ranks that come to `listener`.
    pub(super) fn start(listener: TcpListener, config: &ControlConfig) -> io::Result<Self> {
        let server = Self {
            hub: Arc::new(Hub::new(config)),
            address: listener.local_addr()?,
            closed: Arc::default(),
        };
        allow_connections(config.world_size);
        // Else a hundred connections that have not been accepted yet hold all others up for a second.
        listen_again(&listener, Backlog::MAXCONN)?;
        let (hub, closed) = (server.hub.clone(), server.closed.clone());
        spawn("control-accept", move || accept(&hub, &listener, &closed))?;
        let (hub, closed) = (server.hub.clone(), server.closed.clone());
        let interval = config.beat_interval();
        spawn("control-watch", move || {
            while !closed.load(Ordering::Acquire) {
                hub.tick();
                std::thread::sleep(interval);
            }
        })?;
        Ok(server)
    }

    /// Where it listens.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// An address of this host at which the server can be reached from here.
    pub(super) fn local_address(&self) -> SocketAddr {
        let mut address = self.address;
        if address.ip().is_unspecified() {
            address.set_ip(match address {
                SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
                SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
            });
        }
        address
    }

    /// Blocks until every rank knows why the run ends, if it does, or for `limit`.
    pub(super) fn wait_until_known(&self, limit: Duration) {
        self.hub.wait_until_known(limit);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.closed.store(true, Ordering::Release);
        self.hub.close();
        // Wakes the thread that accepts. If that fails the listener stays open until the process ends.
        drop(TcpStream::connect(self.local_address()));
    }
}

/// Lets this process have as many files open as connections of ranks take, of which it has three each, if it may.
fn allow_connections(world_size: usize) {
    let wanted = 4 * world_size as u64 + 2048;
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(now, most)| match now < wanted {
        true => setrlimit(Resource::RLIMIT_NOFILE, wanted.min(most), most),
        false => Ok(()),
    });
    if let Err(errno) = raised {
        tracing::warn!(
            "rank 0 cannot have {wanted} files open, so some ranks may not get in: {errno}"
        );
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let builder = Builder::new()
        .name(name.to_string())
        .stack_size(STACK_BYTES);
    builder.spawn(run).map(drop)
}

fn accept(hub: &Arc<Hub>, listener: &TcpListener, closed: &AtomicBool) {
    let strangers = Arc::new(Strangers::new(hub.world_size()));
    for (number, stream) in (0..).zip(listener.incoming()) {
        if closed.load(Ordering::Acquire) {
            return;
        }
        let stream = stream.and_then(|stream| Ok((stream.try_clone()?, stream)));
        let Ok((clone, stream)) = stream else {
            // Out of file descriptors, say: it passes or it does not, but it is no reason to spin.
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        strangers.add(number, clone);
        let (hub, here) = (hub.clone(), strangers.clone());
        let spawned = spawn("control-rank", move || {
            let peer = stream.peer_addr();
            let met = meet(&hub, stream);
            here.remove(number);
            match met {
                Ok((rank, reader)) => listen(&hub, rank, reader),
                Err(error) => tracing::debug!("refused a connection from {peer:?}: {error}"),
            }
        });
        if let Err(error) = spawned {
            strangers.remove(number);
            tracing::warn!("no thread for a connection of a rank: {error}");
        }
    }
}

/// Finds out who has connected; returns its rank if it is let in.
fn meet(hub: &Arc<Hub>, stream: TcpStream) -> io::Result<(usize, BufReader<Timed>)> {
    stream.set_nodelay(true)?;
    let mut timed = Timed::new(stream.try_clone()?, HANDSHAKE);
    let (version, _) = handshake::as_server(&mut timed, &hub.secret, Purpose::Control)?;
    let mut reader = BufReader::new(timed);
    let (hello, _): (Hello, _) = wire::read(&mut reader, Limits::STRANGER)?;
    let rank = hello.rank;
    if let Err(told) = hub.admit(hello, version, &stream) {
        let error = io::Error::other(format!("{told:?}"));
        stream.set_write_timeout(Some(HANDSHAKE))?;
        (&stream).write_all(&wire::frame(&told, &[])?)?;
        stream.shutdown(Shutdown::Write)?;
        return Err(error);
    }
    reader.get_mut().lift()?;
    Ok((rank, reader))
}

fn listen(hub: &Arc<Hub>, rank: usize, mut reader: BufReader<Timed>) {
    let why = loop {
        match wire::read::<FromRank>(&mut reader, Limits::RANK) {
            Ok((message, body)) => hub.handle(rank, message, body),
            Err(error) => break error,
        }
    };
    hub.gone(rank, &why);
}
