//! Threads of the launcher and its agents.

use std::process::exit;
use std::thread::{Builder, JoinHandle};

use super::WOULD_FAIL_AGAIN_EXIT_CODE;
use super::say::say;
use crate::limits::at_limit;

/// Starts a thread. Without it nothing can go on, so the process ends with a sentence; what it has started hears of its end.
pub(super) fn start<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    Builder::new().spawn(run).unwrap_or_else(|error| {
        say(&format!("cannot start a thread: {}", at_limit(&error)));
        exit(i32::from(WOULD_FAIL_AGAIN_EXIT_CODE))
    })
}
