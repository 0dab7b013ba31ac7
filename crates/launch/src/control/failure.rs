//! Why a run ended, in words that both ends of a connection use, and how a process ends of it.

use std::io::{self, Write};
use std::sync::mpsc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::spawn;
use crate::PEER_FAILED_EXIT_CODE;

/// What the main thread gets to end by itself.
const GRACE: Duration = Duration::from_secs(1);

/// Why a run ended before its ranks had left it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Failure {
    /// What kind of end it is.
    pub kind: FailureKind,
    /// The rank at fault, if it is one: none if all failed by themselves, with the same words.
    pub rank: Option<usize>,
    /// What happened, to which rank on which host, and what it did last.
    pub message: String,
}

impl Failure {
    /// Whether all ranks failed by themselves, with the same words: then it is enough if rank 0 shows them.
    pub fn is_of_all(&self) -> bool {
        self.kind == FailureKind::Failed && self.rank.is_none()
    }
}

/// The ways in which a run ends early.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum FailureKind {
    /// A rank's process is gone, or cannot be reached.
    Died,
    /// A rank said that it failed, or all did.
    Failed,
    /// A rank was asked to end by a signal.
    Terminated,
    /// An operation lasted longer than the deadline.
    Deadline,
    /// Ranks wait for each other in different groups.
    Deadlock,
}

/// What happened to a rank whose connection cannot be read any more.
pub(super) fn died(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::InvalidData => format!("died: it sent what is no message ({error})"),
        _ => "died: its connection closed without a goodbye".to_string(),
    }
}

/// What happened to a rank that says nothing.
pub(super) fn silent(silence: Duration) -> String {
    format!("has not been heard of for {:.0} s", silence.as_secs_f64())
}

pub(super) const DIED_HINT: &str = "hint: see what this rank itself printed; a process that was killed prints nothing (the \
    kernel's log, `dmesg`, tells if its host was out of memory)";

pub(super) const SILENT_HINT: &str =
    "hint: its process is stopped, its host is down or the network between the hosts is cut";

/// Prints `text` on standard error and calls `printed`, on a thread of its own, since standard error may be locked or its pipe full.
fn print(text: String, printed: impl FnOnce() + Send + 'static) {
    let print = move || {
        // In one piece, so that lines of ranks do not mix. There is nowhere else to say that it failed.
        let _ = io::stderr().write_all(text.as_bytes());
        printed();
    };
    if let Err(error) = spawn("control-print", print) {
        tracing::error!("no thread to say why the run ends: {error}");
    }
}

/// Prints `text` on standard error, without waiting for who reads it.
pub fn print_aside(text: String) {
    print(text, || ());
}

/// Prints `text` on standard error and ends this process with this exit code, within a second whatever its threads do: no exit
/// handler runs.
pub fn end_process(text: String, exit_code: u8) -> ! {
    print_in_time(text);
    exit_at_once(exit_code)
}

/// Prints `text` on standard error, and waits a second at most for who reads it.
pub fn print_in_time(text: String) {
    let (printed, is_printed) = mpsc::channel();
    print(text, move || drop(printed));
    // Either it is dropped, or it takes too long.
    let _: Result<(), _> = is_printed.recv_timeout(GRACE);
}

/// Prints `text` and calls `printed`; ends the process after a moment if `ends_process`.
pub(super) fn end(text: String, ends_process: bool, printed: impl FnOnce() + Send + 'static) {
    print(text, printed);
    let exit = || {
        std::thread::sleep(GRACE);
        exit_at_once(PEER_FAILED_EXIT_CODE);
    };
    if ends_process && spawn("control-exit", exit).is_err() {
        exit_at_once(PEER_FAILED_EXIT_CODE);
    }
}

/// Ends the process without running exit handlers: those of MPI and CUDA may wait for the rank that is gone.
#[allow(unsafe_code)]
fn exit_at_once(exit_code: u8) -> ! {
    // SAFETY: `_exit` has no preconditions; it runs no code of this process.
    unsafe { nix::libc::_exit(i32::from(exit_code)) }
}
