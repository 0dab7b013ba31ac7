//! The signals that end a run.

use nix::sys::signal::Signal;

use crate::limits::at_limit;
use crate::signal_pipe::{self, Watcher, is_heard};
use crate::{Error, Result};

/// What users, terminals and batch systems send to end a program.
const ENDING: [Signal; 4] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
];

/// Calls `on_signal` with each ending signal, on a thread of its own. One that is ignored, as SIGHUP is under `nohup`, stays ignored.
pub(super) fn watch(mut on_signal: impl FnMut(Signal) + Send + 'static) -> Result<()> {
    let hear = move |signal| {
        on_signal(signal);
        false
    };
    let watcher = (Watcher::Launcher, "signals");
    signal_pipe::watch(watcher, &ENDING, is_heard, hear)
        .map_err(|error| Error::Launch(format!("cannot watch for signals: {}", at_limit(&error))))
}
