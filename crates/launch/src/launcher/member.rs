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

use super::call::{Caller, Offer, Order, call};
use super::config::LaunchConfig;
use super::end::LOST_HOST_EXIT_CODE;
use super::{process_tree, shares, signals};
use crate::{Error, Result, Secret};

/// How long the launcher that leads may be late.
const PATIENCE: Duration = Duration::from_secs(300);
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
        num_ranks: share.num_ranks,
        program: config.program.clone(),
    });
    let mut was_needed = false;
    let mut until = Instant::now() + PATIENCE;
    loop {
        let order = called(front, secret, &caller, until).and_then(|stream| line.wait(stream));
        match order {
            // Another thread ends this process.
            _ if line.is_leaving() => loop {
                std::thread::park();
            },
            Ok((Order::Run(command), stream)) => {
                (was_needed, until) = (true, Instant::now());
                process_tree::reap();
                run(&command, stream)
                    .map_err(|error| Error::Launch(format!("cannot start a shell: {error}")))?;
            }
            Ok((Order::End(code, sentence), _)) => {
                end(ENDING);
                return Ok((code, Some(sentence).filter(|sentence| !sentence.is_empty())));
            }
            Err(error) => {
                end(ENDING);
                let what =
                    format!("the launcher at {front}, which leads this run, is not there: {error}");
                return match was_needed {
                    true => Ok((LOST_HOST_EXIT_CODE, Some(what))),
                    false => Err(Error::Launch(what)),
                };
            }
        }
    }
}

/// The connection on which this host waits, and whether it does not wait any more.
#[derive(Default)]
struct Line {
    waiting: Mutex<Option<TcpStream>>,
    left_at: OnceLock<Instant>,
}

impl Line {
    fn wait(&self, stream: TcpStream) -> std::io::Result<(Order, TcpStream)> {
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) = Some(stream.try_clone()?);
        if self.is_leaving() {
            stream.shutdown(Shutdown::Both)?;
        }
        Ok((Order::receive(&stream)?, stream))
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

/// A connection, once there is one.
fn called(
    front: &str,
    secret: &Secret,
    caller: &Caller,
    until: Instant,
) -> std::io::Result<TcpStream> {
    loop {
        match call(front, secret, caller) {
            Err(error) if Instant::now() < until && error.kind() != ErrorKind::PermissionDenied => {
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
