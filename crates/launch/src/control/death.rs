//! How ranks are seen to die, in words that both ends of a connection use.

use std::io;
use std::time::Duration;

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
