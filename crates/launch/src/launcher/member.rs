//! A launcher that another one leads: it waits until that one needs its host, and runs what it is told.

use std::io::{Error as IoError, ErrorKind};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::prctl::set_child_subreaper;

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
    // The launcher that leads notices, and goes on without this host.
    signals::watch(signals, |signal| {
        process_tree::kill_descendants();
        eprintln!("candle-train: stopped by {}", signal.as_str());
        std::process::exit(128 + signal as i32);
    });
    let share = shares::own(config)?;
    let caller = Caller::Host(Offer {
        name: share.name,
        num_ranks: share.num_ranks,
        program: config.program.clone(),
    });
    let mut was_needed = false;
    let mut until = Instant::now() + PATIENCE;
    loop {
        let order = called(front, secret, &caller, until)
            .and_then(|stream| Ok((Order::receive(&stream)?, stream)));
        match order {
            Ok((Order::Run(command), stream)) => {
                (was_needed, until) = (true, Instant::now());
                process_tree::reap();
                run(&command, stream)
                    .map_err(|error| Error::Launch(format!("cannot start a shell: {error}")))?;
            }
            Ok((Order::End(code, sentence), _)) => {
                end();
                return Ok((code, Some(sentence).filter(|sentence| !sentence.is_empty())));
            }
            Err(error) => {
                end();
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
        .spawn()
        .map(drop)
}

/// Lets what was started here end.
fn end() {
    let begin = Instant::now();
    while process_tree::reap() && begin.elapsed() < ENDING {
        std::thread::sleep(process_tree::KILL_INTERVAL);
    }
    process_tree::kill_descendants();
}
