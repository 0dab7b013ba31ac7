//! Connections that have not shown yet that they know the run's secret.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nix::sys::socket::{Backlog, listen as listen_again};

use super::HANDSHAKE;
use crate::control::spawn;
use crate::limits::at_limit;
use crate::lock::lock;

/// How many there may be beyond the world size.
const SPARE: usize = 256;

/// Connections that have not shown yet that they know the run's secret. When there are too many the oldest is closed: a rank
/// takes a moment to show it, and however many others come, they do not keep it out.
pub(crate) struct Strangers {
    max: usize,
    /// With the number that each of them has.
    waiting: Mutex<VecDeque<(u64, TcpStream)>>,
}

impl Strangers {
    /// Accepts what comes to `listener`. Each connection has a thread, on which it is a stranger until `meet` returns; `receive` then
    /// gets what `meet` has made of it.
    pub(crate) fn serve<T>(
        listener: TcpListener,
        world_size: usize,
        meet: impl Fn(TcpStream) -> io::Result<T> + Send + Sync + 'static,
        receive: impl Fn(T) + Send + Sync + 'static,
    ) -> io::Result<Serving> {
        // Else a hundred connections that have not been accepted yet hold all others up for a second.
        listen_again(&listener, Backlog::MAXCONN)?;
        let serving = Serving {
            address: listener.local_addr()?,
            is_closed: Arc::default(),
        };
        let is_closed = serving.is_closed.clone();
        let strangers = Arc::new(Self {
            max: world_size.saturating_add(SPARE),
            waiting: Mutex::default(),
        });
        let (meet, receive) = (Arc::new(meet), Arc::new(receive));
        spawn("control-accept", move || {
            let mut is_said = false;
            for (number, stream) in (0..).zip(listener.incoming()) {
                if is_closed.load(Ordering::Acquire) {
                    return;
                }
                let (here, meet, receive) = (strangers.clone(), meet.clone(), receive.clone());
                let served = stream.and_then(|stream| {
                    strangers.add(number, stream.try_clone()?);
                    spawn("control-rank", move || {
                        let peer = stream.peer_addr();
                        let met = meet(stream);
                        here.remove(number);
                        match met {
                            Ok(known) => receive(known),
                            Err(error) => {
                                tracing::debug!("refused a connection from {peer:?}: {error}");
                            }
                        }
                    })
                });
                let Err(error) = served else { continue };
                strangers.remove(number);
                if !is_said {
                    let error = at_limit(&error);
                    tracing::warn!("a rank or launcher that calls gets no answer: {error}");
                    is_said = true;
                }
                // It passes or it does not, but it is no reason to spin.
                std::thread::sleep(Duration::from_millis(100));
            }
        })?;
        Ok(serving)
    }

    fn add(&self, number: u64, stream: TcpStream) {
        let mut waiting = lock(&self.waiting);
        waiting.push_back((number, stream));
        if waiting.len() > self.max
            && let Some((_, oldest)) = waiting.pop_front()
        {
            // Nothing to do about one that is closed already.
            let _ = oldest.shutdown(Shutdown::Both);
        }
    }

    /// It is none any more.
    fn remove(&self, number: u64) {
        lock(&self.waiting).retain(|(other, _)| *other != number);
    }
}

/// A listener whose connections are [served](Strangers::serve) until this is dropped.
pub(crate) struct Serving {
    /// Where it listens.
    pub(crate) address: SocketAddr,
    is_closed: Arc<AtomicBool>,
}

impl Serving {
    /// An address of this host at which it can be reached from here.
    pub(crate) fn local_address(&self) -> SocketAddr {
        let mut address = self.address;
        if address.ip().is_unspecified() {
            address.set_ip(match address {
                SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
                SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
            });
        }
        address
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.is_closed.store(true, Ordering::Release);
        // Wakes the thread that accepts. If that fails the listener stays open until the process ends.
        drop(TcpStream::connect_timeout(&self.local_address(), HANDSHAKE));
    }
}
