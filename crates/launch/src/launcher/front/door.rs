//! Where the front listens for [calls](super::super::call), and the hosts that wait there until they are needed.

use std::io::{ErrorKind, copy};
use std::net::{Shutdown, TcpListener, TcpStream, UdpSocket};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::process::poll;
use super::{FrontEvent, NOT_STARTED_EXIT_CODE};
use crate::control::server::HANDSHAKE;
use crate::control::server::strangers::Strangers;
use crate::launcher::call::{self, Call, Caller, Order};
use crate::launcher::host::Host;
use crate::launcher::thread;
use crate::launcher::wire::ALIVE_INTERVAL;
use crate::lock::lock;
use crate::{Error, Result, Secret};

/// A port of any service, to ask for a route: nothing is sent.
const ANY_PORT: u16 = 9;

/// A host that is used calls again at once; who wants to use it again waits this long.
const RETURN: Duration = Duration::from_secs(10);

/// Where the front listens, as long as the process lives.
pub(super) struct Door {
    /// HOST:PORT.
    pub(super) address: String,
    pub(super) secret: Secret,
    /// What hosts that come must have been told to run, and the secret too; none if the secret is one for this run.
    program: Option<Vec<String>>,
    /// The hosts that wait until they are needed; one connection each.
    waiting: Mutex<Vec<(Host, Call)>>,
    events: Sender<FrontEvent>,
}

impl Door {
    /// One at this host's address on the way to `host`, or on loopback, for agents, who then become events.
    ///
    /// # Errors
    /// There is no way to that host, or no free port.
    pub(super) fn for_agents(
        host: Option<&Host>,
        events: &Sender<FrontEvent>,
    ) -> Result<Arc<Self>> {
        let own = match host {
            None => "127.0.0.1".parse().map_err(std::io::Error::other),
            Some(host) => {
                let way = UdpSocket::bind("[::]:0").or_else(|_| UdpSocket::bind("0.0.0.0:0"));
                way.and_then(|way| {
                    way.connect((host.name.as_str(), ANY_PORT))?;
                    Ok(way.local_addr()?.ip().to_canonical())
                })
            }
        };
        let bound = own.and_then(|own| TcpListener::bind((own, 0)));
        let bound = bound.and_then(|listener| Ok((listener.local_addr()?, listener)));
        let (address, listener) = bound
            .map_err(|error| Error::Launch(format!("cannot listen for the agents: {error}")))?;
        let at = (address.to_string(), Secret::random()?);
        Self::open(listener, at, None, events)
    }

    /// One at this listener, which others know by this address and secret; hosts may come if they have been told the same program.
    ///
    /// # Errors
    /// The listener cannot be used.
    pub(super) fn open(
        listener: TcpListener,
        (address, secret): (String, Secret),
        program: Option<Vec<String>>,
        events: &Sender<FrontEvent>,
    ) -> Result<Arc<Self>> {
        let door = Arc::new(Self {
            address,
            secret: secret.clone(),
            program,
            waiting: Mutex::default(),
            events: events.clone(),
        });
        let answer = move |stream| call::answer(stream, &secret, HANDSHAKE);
        let receiving = door.clone();
        let receive = move |(caller, call)| {
            if let Err(error) = receiving.receive(caller, call) {
                tracing::debug!("a call ends: {error}");
            }
        };
        let serving = Strangers::serve(listener, 0, answer, receive)
            .map_err(|error| Error::Launch(format!("cannot listen for calls: {error}")))?;
        // To be served as long as the process lives.
        std::mem::forget(serving);
        let living = door.clone();
        thread::start(move || {
            loop {
                std::thread::sleep(ALIVE_INTERVAL);
                // Who waits hears that this process lives; who takes nothing is gone.
                lock(&living.waiting).retain(|(_, call)| Order::send_none(call).is_ok());
            }
        });
        Ok(door)
    }

    /// Whether callers have the secret already.
    pub(super) fn is_secret_given(&self) -> bool {
        self.program.is_some()
    }

    fn receive(&self, caller: Caller, call: Call) -> std::io::Result<()> {
        match caller {
            Caller::Rank(rank) => {
                let stream = call.stream;
                let _ = self.events.send(FrontEvent::Called { rank, stream });
            }
            Caller::Shell { host, command } => self.connect(&host, command, &call.stream)?,
            Caller::Host { host, program } => {
                let own = self.program.as_deref().unwrap_or_default();
                if program == own {
                    self.add(host, call)?;
                } else {
                    let (own, other) = (own.join(" "), program.join(" "));
                    let what = format!(
                        "this host was told to run {other:?}, and the one that leads {own:?}"
                    );
                    Order::End(NOT_STARTED_EXIT_CODE, what).send(&call)?;
                }
            }
        }
        Ok(())
    }

    /// A host is there, perhaps again: then the connection that it had is gone, or is that of a launcher which is replaced.
    fn add(&self, host: Host, call: Call) -> std::io::Result<()> {
        call.stream.set_write_timeout(Some(ALIVE_INTERVAL))?;
        let mut waiting = lock(&self.waiting);
        for (other, call) in waiting.extract_if(.., |(other, _)| other.name == host.name) {
            if other.id != host.id {
                let name = &host.name;
                let what = format!("another launcher has come that is known as host {name}");
                // Nothing to do about one that is gone.
                let _ = Order::End(NOT_STARTED_EXIT_CODE, what).send(&call);
            }
        }
        waiting.push((host, call));
        Ok(())
    }

    /// Joins a caller with a shell that runs this command on a host, until both ends are closed.
    fn connect(&self, host: &str, command: String, caller: &TcpStream) -> std::io::Result<()> {
        let taken = poll(RETURN, || {
            let mut waiting = lock(&self.waiting);
            let place = waiting.iter().position(|(waits, _)| waits.name == host)?;
            Some(waiting.swap_remove(place).1)
        });
        let missing = || std::io::Error::other(format!("host {host} is not there"));
        let shell = taken.ok_or_else(missing)?;
        Order::Run(command).send(&shell)?;
        let shell = shell.stream;
        shell.set_write_timeout(None)?;
        let (from_shell, to_caller) = (shell.try_clone()?, caller.try_clone()?);
        let back = thread::start(move || pass(&from_shell, &to_caller));
        pass(caller, &shell);
        let _ = back.join();
        Ok(())
    }

    /// The hosts that are there.
    pub(super) fn hosts(&self) -> Vec<Host> {
        let mut waiting = lock(&self.waiting);
        waiting.retain(|(_, call)| is_open(&call.stream));
        waiting.iter().map(|(host, _)| host.clone()).collect()
    }

    /// Hangs up on hosts that were lost: those that live call again.
    pub(super) fn remove(&self, names: &[String]) {
        lock(&self.waiting).retain(|(host, _)| !names.contains(&host.name));
    }

    /// Tells the hosts that are there that the run is over, and waits for those that have not come back yet.
    pub(super) fn close(&self, code: u8, sentence: &str, mut missing: Vec<&str>) {
        poll(RETURN, || {
            for (host, call) in lock(&self.waiting).drain(..) {
                missing.retain(|name| *name != host.name);
                let _ = Order::End(code, sentence.to_string()).send(&call);
            }
            missing.is_empty().then_some(())
        });
    }
}

fn pass(mut from: &TcpStream, mut to: &TcpStream) {
    let _ = copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Write);
}

/// Whether nobody has closed it: a host that waits says nothing.
fn is_open(stream: &TcpStream) -> bool {
    let looked = stream
        .set_nonblocking(true)
        .and_then(|()| stream.peek(&mut [0]));
    let is_quiet = looked.is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
    is_quiet && stream.set_nonblocking(false).is_ok()
}
