//! A launcher that another one leads: it waits until that one needs its host, and runs what it is told.

use std::io::{Error as IoError, ErrorKind};
use std::net::{Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::prctl::set_child_subreaper;
use nix::sys::signal::Signal;

use super::call::{Call, Caller, Offer, Order, call};
use super::config::LaunchConfig;
use super::end::LOST_HOST_EXIT_CODE;
use super::{process_tree, shares, signals};
use crate::secret::random_bytes;
use crate::{Error, Result, Secret};

/// How long the launcher that leads may be late.
const PATIENCE: Duration = Duration::from_secs(300);
/// How long it may be out of reach once it was there.
const ABSENCE: Duration = Duration::from_secs(60);
/// The time between two attempts to reach it.
const PAUSE: Duration = Duration::from_millis(500);
/// What was started here ends by itself when nobody leads any more; after this long it is killed.
const ENDING: Duration = Duration::from_secs(30);

/// Serves the launcher at this address to its end: the exit code, and why.
pub(super) fn serve(
    config: &LaunchConfig,
    front: &str,
    secret: &Secret,
) -> Result<(u8, Option<String>)> {
    let signals = signals::block()?;
    set_child_subreaper(true)
        .map_err(|errno| Error::Launch(format!("cannot become a subreaper: {errno}")))?;
    let line = Arc::<Line>::default();
    let on_signal = line.clone();
    signals::watch(signals, move |signal| on_signal.leave(signal));
    let share = shares::own(config)?;
    let caller = Caller::Host(Offer {
        name: share.name,
        id: random_bytes()
            .map(u64::from_le_bytes)
            .map_err(|error| Error::Launch(format!("cannot read /dev/urandom: {error}")))?,
        num_ranks: share.num_ranks,
        program: config.program.clone(),
    });
    let (mut was_there, mut was_needed) = (false, false);
    let mut until = Instant::now() + PATIENCE;
    loop {
        // A launcher that leads listens as long as it lives.
        let is_gone = |kind| was_there && kind == ErrorKind::ConnectionRefused;
        let may_come = |kind| Instant::now() < until && !is_gone(kind);
        let called = called(front, secret, &caller, may_come);
        was_there |= called.is_ok();
        let begin = Instant::now();
        let waited = called.map(|call| line.wait(call));
        if begin.elapsed() > ABSENCE {
            until = Instant::now() + ABSENCE;
        }
        // Another thread ends this process.
        if line.is_leaving() {
            loop {
                std::thread::park();
            }
        }
        let error = match waited {
            Ok(Ok((Order::Run(command), stream))) => {
                was_needed = true;
                until = Instant::now() + ABSENCE;
                // An earlier start of the ranks is over.
                process_tree::kill_descendants();
                run(&command, stream)
                    .map_err(|error| Error::Launch(format!("cannot start a shell: {error}")))?;
                continue;
            }
            Ok(Ok((Order::End(code, sentence), _))) => {
                end(ENDING);
                return Ok((code, Some(sentence).filter(|sentence| !sentence.is_empty())));
            }
            // The line was cut, or the launcher that leads asks whether this one lives.
            Ok(Err(error))
                if error.kind() != ErrorKind::PermissionDenied && Instant::now() < until =>
            {
                std::thread::sleep(PAUSE);
                continue;
            }
            Ok(Err(error)) | Err(error) => error,
        };
        end(ENDING);
        let what = format!("the launcher at {front}, which leads this run, is not there: {error}");
        return match was_needed {
            true => Ok((LOST_HOST_EXIT_CODE, Some(what))),
            false => Err(Error::Launch(what)),
        };
    }
}

/// The connection on which this host waits, and whether it does not wait any more.
#[derive(Default)]
struct Line {
    waiting: Mutex<Option<TcpStream>>,
    left_at: OnceLock<Instant>,
}

impl Line {
    fn wait(&self, call: Call) -> std::io::Result<(Order, TcpStream)> {
        let clone = call.stream.try_clone()?;
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) = Some(clone);
        if self.is_leaving() {
            call.stream.shutdown(Shutdown::Both)?;
        }
        Ok((Order::receive(&call)?, call.stream))
    }

    fn is_leaving(&self) -> bool {
        self.left_at.get().is_some()
    }

    /// Hangs up: the launcher that leads notices, has the ranks stop well, and goes on without this host. A second signal, at least a
    /// second later, does not wait for that.
    fn leave(&self, signal: Signal) {
        let is_first = !self.is_leaving();
        let left_at = *self.left_at.get_or_init(Instant::now);
        if !is_first && left_at.elapsed() < Duration::from_secs(1) {
            return;
        }
        let line = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(stream) = line.as_ref() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        std::thread::spawn(move || {
            end(if is_first { PATIENCE } else { Duration::ZERO });
            eprintln!("candle-train: stopped by {}", signal.as_str());
            std::process::exit(128 + signal as i32);
        });
    }
}

/// A connection, once there is one; given up at an error after which none may come.
fn called(
    front: &str,
    secret: &Secret,
    caller: &Caller,
    may_come: impl Fn(ErrorKind) -> bool,
) -> std::io::Result<Call> {
    loop {
        match call(front, secret, caller) {
            Err(error) if error.kind() != ErrorKind::PermissionDenied && may_come(error.kind()) => {
                std::thread::sleep(PAUSE);
            }
            called => return called,
        }
    }
}

/// Starts a shell whose stdin and stdout are the connection. Nobody waits for it: what it starts may outlive it.
fn run(command: &str, stream: TcpStream) -> std::result::Result<(), IoError> {
    let input = OwnedFd::from(stream.try_clone()?);
    Command::new("sh")
        .args(["-c", command])
        .stdin(Stdio::from(input))
        .stdout(Stdio::from(OwnedFd::from(stream)))
        // A terminal's Ctrl-C is for this launcher, which leaves well.
        .process_group(0)
        .spawn()
        .map(drop)
}

/// Lets what was started here end, and kills it after this time.
fn end(limit: Duration) {
    let begin = Instant::now();
    while process_tree::reap() && begin.elapsed() < limit {
        std::thread::sleep(process_tree::KILL_INTERVAL);
    }
    process_tree::kill_descendants();
}
