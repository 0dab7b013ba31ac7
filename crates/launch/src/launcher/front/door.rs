//! Where the front listens for [calls](super::super::call).

use std::net::{TcpListener, UdpSocket};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use super::Event;
use super::room::Room;
use crate::control::server::HANDSHAKE;
use crate::control::server::strangers::Strangers;
use crate::launcher::call::{self, Call, Caller, Order};
use crate::{Error, Result, Secret};

/// A port of any service, to ask for a route: nothing is sent.
const ANY_PORT: u16 = 9;

/// Where the front listens, and the secret that callers know.
pub(super) struct Door {
    /// HOST:PORT.
    pub(super) address: String,
    pub(super) secret: Secret,
    /// Whether callers have the secret already: otherwise it is one for this run.
    pub(super) is_given: bool,
    /// The hosts that have come.
    pub(super) room: Arc<Room>,
}

impl Door {
    /// Opens one that stays open as long as the process lives, at this host's address on the way to `host`, or on loopback; those
    /// who call become events.
    ///
    /// # Errors
    /// There is no way to that host, or no free port.
    pub(super) fn open(host: Option<&str>, events: &Sender<Event>) -> Result<Self> {
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
        let bound = own.and_then(|own| TcpListener::bind((own, 0)));
        let bound = bound.and_then(|listener| Ok((listener.local_addr()?, listener)));
        let (address, listener) = bound
            .map_err(|error| Error::Launch(format!("cannot listen for the agents: {error}")))?;
        let secret = Secret::random()?;
        let address = address.to_string();
        Ok(Self::at(listener, address, (secret, false), &[], events))
    }

    /// One at this listener, which others know as `address`; hosts that come must have been told the same program.
    pub(super) fn at(
        listener: TcpListener,
        address: String,
        (secret, is_given): (Secret, bool),
        program: &[String],
        events: &Sender<Event>,
    ) -> Self {
        let room = Arc::<Room>::default();
        let guard = Guard {
            secret: secret.clone(),
            program: program.to_vec(),
            room: room.clone(),
            events: events.clone(),
        };
        std::thread::spawn(move || accept(&listener, &Arc::new(guard)));
        Self {
            address,
            secret,
            is_given,
            room,
        }
    }
}

/// What decides who is let in.
struct Guard {
    secret: Secret,
    program: Vec<String>,
    room: Arc<Room>,
    events: Sender<Event>,
}

impl Guard {
    fn receive(&self, caller: Caller, call: Call) -> std::io::Result<()> {
        match caller {
            Caller::Rank(rank) => {
                let stream = call.stream;
                let _ = self.events.send(Event::Called { rank, stream });
            }
            Caller::Host { program, .. } if program != self.program => {
                let (own, other) = (self.program.join(" "), program.join(" "));
                let what =
                    format!("this host was told to run {other:?}, and the one that leads {own:?}");
                Order::End(super::NOT_STARTED_EXIT_CODE, what).send(&call)?;
            }
            Caller::Host { host, .. } => self.room.add(host, call),
            Caller::Shell { host, command } => self.room.connect(&host, command, &call.stream)?,
        }
        Ok(())
    }
}

fn accept(listener: &TcpListener, guard: &Arc<Guard>) {
    let strangers = Arc::new(Strangers::new(0));
    for (number, stream) in (0..).zip(listener.incoming()) {
        let stream = stream.and_then(|stream| Ok((stream.try_clone()?, stream)));
        let Ok((clone, stream)) = stream else {
            // Out of file descriptors, say.
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        strangers.add(number, clone);
        let (guard, here) = (guard.clone(), strangers.clone());
        std::thread::spawn(move || {
            let peer = stream.peer_addr();
            let answered = call::answer(stream, &guard.secret, HANDSHAKE);
            here.remove(number);
            if let Err(error) = answered.and_then(|(caller, call)| guard.receive(caller, call)) {
                tracing::debug!("a connection from {peer:?} ends: {error}");
            }
        });
    }
}
