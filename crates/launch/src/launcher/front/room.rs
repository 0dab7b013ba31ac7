//! The hosts that have called and wait until they are needed.

use std::io::copy;
use std::net::{Shutdown, TcpStream};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::NOT_STARTED_EXIT_CODE;
use super::process::poll;
use crate::launcher::call::{Call, Order};
use crate::launcher::host::Host;

/// A host that is used calls again at once; who wants to use it again waits this long.
const RETURN: Duration = Duration::from_secs(10);

/// The hosts that have called and wait until they are needed; one connection each.
#[derive(Default)]
pub(super) struct Room(Mutex<Vec<(Host, Call)>>);

impl Room {
    /// A host is there, perhaps again: then the connection that it had is gone, or is that of a launcher which is replaced.
    pub(super) fn add(&self, host: Host, call: Call) {
        let mut waiting = self.lock();
        for (other, call) in waiting.extract_if(.., |(other, _)| other.name == host.name) {
            if other.id != host.id {
                let what = format!(
                    "another launcher has come that is known as host {}",
                    host.name
                );
                // Nothing to do about one that is gone.
                let _ = Order::End(NOT_STARTED_EXIT_CODE, what).send(&call);
            }
        }
        waiting.push((host, call));
    }

    /// Hangs up on hosts that were lost: those that live call again.
    pub(super) fn remove(&self, names: &[String]) {
        self.lock().retain(|(host, _)| !names.contains(&host.name));
    }

    /// The hosts that are there.
    pub(super) fn hosts(&self) -> Vec<Host> {
        let mut waiting = self.lock();
        waiting.retain(|(_, call)| is_open(&call.stream));
        waiting.iter().map(|(host, _)| host.clone()).collect()
    }

    /// Joins a caller with a shell that runs this command on a host, until both ends are closed.
    pub(super) fn connect(
        &self,
        host: &str,
        command: String,
        caller: &TcpStream,
    ) -> std::io::Result<()> {
        let taken = poll(RETURN, || {
            let mut waiting = self.lock();
            let place = waiting.iter().position(|(waits, _)| waits.name == host)?;
            Some(waiting.swap_remove(place).1)
        });
        let missing = || std::io::Error::other(format!("host {host} is not there"));
        let shell = taken.ok_or_else(missing)?;
        Order::Run(command).send(&shell)?;
        let shell = shell.stream;
        let (from_shell, to_caller) = (shell.try_clone()?, caller.try_clone()?);
        let back = std::thread::spawn(move || pass(&from_shell, &to_caller));
        pass(caller, &shell);
        let _ = back.join();
        Ok(())
    }

    /// Tells the hosts that are there that the run is over, and waits for those that have not come back yet.
    pub(super) fn close(&self, (code, sentence): (u8, &str), mut missing: Vec<String>) {
        poll(RETURN, || {
            for (host, call) in self.lock().drain(..) {
                missing.retain(|name| *name != host.name);
                let _ = Order::End(code, sentence.to_string()).send(&call);
            }
            missing.is_empty().then_some(())
        });
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(Host, Call)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
    let is_quiet = looked.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock);
    is_quiet && stream.set_nonblocking(false).is_ok()
}
