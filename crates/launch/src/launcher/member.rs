//! A launcher that another one leads: it waits until that one needs its host, and runs what it is told.

use std::io::{Error as IoError, ErrorKind};
use std::net::{Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::call::{Call, Caller, Order, call};
use super::config::{LaunchConfig, secret_variable};
use super::end::LOST_HOST_EXIT_CODE;
use super::host::Host;
use super::layout::silence_ms;
use super::outcome::Outcome;
use super::say::say;
use super::{process_tree, signals, thread};
use crate::lock::lock;
use crate::secret::random_bytes;
use crate::{Error, Result, Secret, SpokenWait, WaitNotices};

/// How long the launcher that leads may be late.
const PATIENCE: Duration = Duration::from_secs(300);
/// How long it may be out of reach once it has given an order, or this host has waited for as long.
const ABSENCE: Duration = Duration::from_secs(60);
/// The time between two attempts to reach it.
const PAUSE: Duration = Duration::from_millis(500);
/// What was started here ends by itself when nobody leads any more; after this long it is killed.
const ENDING: Duration = Duration::from_secs(30);

/// Serves the launcher at this address to its end.
pub(super) fn serve(config: &LaunchConfig, front: &str, secret: &Secret) -> Result<Outcome> {
    let line = Arc::<Line>::default();
    let on_signal = line.clone();
    signals::watch(move |signal| on_signal.leave(signal))?;
    process_tree::adopt_orphans()?;
    let id = random_bytes()
        .map_err(|error| Error::Launch(format!("cannot read /dev/urandom: {error}")))?;
    let caller = Caller::Host {
        host: Host {
            id: u64::from_le_bytes(id),
            ..Host::own(config)?
        },
        program: config.program.clone(),
    };
    let wait = SpokenWait::begin(config.wait_notices, "candle-train: this host");
    wait.say(format!("for the launcher that leads this run at {front}"));
    let silence = Duration::from_millis(silence_ms(config)?);
    let (mut was_there, mut was_needed) = (false, false);
    let mut until = Instant::now() + PATIENCE;
    loop {
        let called = call(front, secret, &caller);
        // A launcher that leads listens as long as it lives.
        let is_refused = |error: &IoError| error.kind() == ErrorKind::ConnectionRefused;
        let is_gone = was_there && called.as_ref().is_err_and(is_refused);
        was_there |= called.is_ok();
        let is_there = called.is_ok();
        wait.say(match &called {
            Ok(_) if was_needed => {
                format!("for word of the launcher at {front}, which leads this run")
            }
            Ok(_) => format!("until the launcher at {front}, which leads this run, needs it"),
            Err(error) => format!("for the launcher that leads this run at {front} ({error})"),
        });
        let begin = Instant::now();
        // While it leads ranks here there is nothing to wait for but its next word.
        let on_word = || {
            if was_needed {
                wait.restart();
            }
        };
        let waited = called.and_then(|call| line.wait(call, silence, on_word));
        // One that hangs up at once, without ever an order, does not lead this host.
        if is_there && was_needed || begin.elapsed() > ABSENCE {
            until = Instant::now() + ABSENCE;
        }
        // Another thread ends this process.
        while line.is_leaving() {
            std::thread::park();
        }
        match waited {
            Ok((Order::Run(command), stream)) => {
                was_needed = true;
                wait.restart();
                until = Instant::now() + ABSENCE;
                // An earlier start of the ranks is over.
                process_tree::kill_descendants();
                run(&command, stream, config)
                    .map_err(|error| Error::Launch(format!("cannot start a shell: {error}")))?;
            }
            Ok((Order::End(code, sentence), _)) => {
                end(ENDING);
                let sentence = Some(sentence).filter(|sentence| !sentence.is_empty());
                return Ok(Outcome::last(code, sentence));
            }
            Err(error)
                if error.kind() == ErrorKind::PermissionDenied
                    || is_gone
                    || Instant::now() >= until =>
            {
                end(ENDING);
                let what =
                    format!("the launcher at {front}, which leads this run, is not there: {error}");
                return match was_needed {
                    true => Ok(Outcome::last(LOST_HOST_EXIT_CODE, Some(what))),
                    false => Err(Error::Launch(what)),
                };
            }
            // It is late, the line was cut, or it asks whether this one lives.
            Err(_) => std::thread::sleep(PAUSE),
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
    /// Waits for an order, as long as there is a word from the launcher that leads in each such time.
    fn wait(
        &self,
        call: Call,
        silence: Duration,
        on_word: impl Fn(),
    ) -> std::io::Result<(Order, TcpStream)> {
        *lock(&self.waiting) = Some(call.stream.try_clone()?);
        if self.is_leaving() {
            call.stream.shutdown(Shutdown::Both)?;
        }
        loop {
            match Order::receive(&call, silence)? {
                Some(order) => return Ok((order, call.stream)),
                None => on_word(),
            }
        }
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
        let line = lock(&self.waiting);
        if let Some(stream) = line.as_ref() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        thread::start(move || {
            end(if is_first { PATIENCE } else { Duration::ZERO });
            say(&format!("stopped by {}", signal.as_str()));
            std::process::exit(128 + signal as i32);
        });
    }
}

/// Starts a shell whose stdin and stdout are the connection. Nobody waits for it: what it starts may outlive it.
fn run(command: &str, stream: TcpStream, config: &LaunchConfig) -> std::io::Result<()> {
    let input = OwnedFd::from(stream.try_clone()?);
    Command::new("sh")
        .args(["-c", command])
        .envs(secret_variable(config.short_secret))
        .stdin(Stdio::from(input))
        .stdout(Stdio::from(OwnedFd::from(stream)))
        // A terminal's Ctrl-C is for this launcher, which leaves well.
        .process_group(0)
        .spawn()
        .map(drop)
}

/// Lets what was started here end, and kills it after this time.
fn end(limit: Duration) {
    let wait = SpokenWait::begin(WaitNotices::default(), "candle-train: this host");
    wait.say("for what was started here to end".to_string());
    let begin = Instant::now();
    while process_tree::reap() && begin.elapsed() < limit {
        std::thread::sleep(process_tree::KILL_INTERVAL);
    }
    process_tree::kill_descendants();
}
