//! Where the front listens for [calls](super::super::call).

use std::net::{TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use super::Event;
use crate::control::server::HANDSHAKE;
use crate::control::server::strangers::Strangers;
use crate::launcher::call::{self, Caller};
use crate::{Error, Result, Secret};

/// A port of any service, to ask for a route: nothing is sent.
const ANY_PORT: u16 = 9;

/// Where the front listens, and the secret that callers know.
pub(super) struct Door {
    /// HOST:PORT.
    pub(super) address: String,
    pub(super) secret: Secret,
}

impl Door {
    /// Opens one that stays open as long as the process lives, at this host's address on the way to `host`, or on loopback; those
    /// who call become events.
    ///
    /// # Errors
    /// There is no way to that host, or no free port.
    pub(super) fn open(host: Option<&str>, events: &Sender<Event>) -> Result<Self> {
        let cannot = |error| Error::Launch(format!("cannot listen for the agents: {error}"));
        let own = match host {
            None => "127.0.0.1".parse().map_err(std::io::Error::other),
            Some(host) => {
                let way = UdpSocket::bind("[::]:0").or_else(|_| UdpSocket::bind("0.0.0.0:0"));
                way.and_then(|way| {
                    way.connect((host, ANY_PORT))?;
                    Ok(way.local_addr()?.ip().to_canonical())
                })
            }
        };
        let listener = own
            .and_then(|own| TcpListener::bind((own, 0)))
            .map_err(cannot)?;
        let address = listener.local_addr().map_err(cannot)?.to_string();
        let secret = Secret::random()?;
        let (known, events) = (secret.clone(), events.clone());
        std::thread::spawn(move || accept(&listener, &known, &events));
        Ok(Self { address, secret })
    }
}

fn accept(listener: &TcpListener, secret: &Secret, events: &Sender<Event>) {
    let strangers = Arc::new(Strangers::new(0));
    for (number, stream) in (0..).zip(listener.incoming()) {
        let stream = stream.and_then(|stream| Ok((stream.try_clone()?, stream)));
        let Ok((clone, stream)) = stream else {
            // Out of file descriptors, say.
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        strangers.add(number, clone);
        let (secret, events, here) = (secret.clone(), events.clone(), strangers.clone());
        std::thread::spawn(move || {
            let caller = call::answer(&stream, &secret, HANDSHAKE);
            here.remove(number);
            match caller {
                Ok(caller) => receive(caller, stream, &events),
                Err(error) => tracing::debug!("refused {:?}: {error}", stream.peer_addr()),
            }
        });
    }
}

fn receive(caller: Caller, stream: TcpStream, events: &Sender<Event>) {
    match caller {
        Caller::Rank(rank) => {
            let _ = events.send(Event::Called { rank, stream });
        }
    }
}
