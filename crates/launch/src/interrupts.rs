//! SIGINT as a wish to end what is being done now, and nothing else.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::signal::Signal;

use crate::signal_pipe::{Watcher, is_heard, watch};

/// Ctrl-C in a program that answers one thing after the other.
#[derive(Clone, Debug, Default)]
pub struct Interrupts {
    is_asked: Arc<AtomicBool>,
}

impl Interrupts {
    /// From now on SIGINT is only noted, for [`Self::take`]; one that comes before the last one was taken ends the process, as it would have
    /// done before. Call it once in a process.
    pub fn hear() -> Self {
        let heard = Self::default();
        let is_asked = heard.is_asked.clone();
        let on_signal = move |_| is_asked.swap(true, Ordering::AcqRel);
        let watcher = (Watcher::Interrupts, "interrupts");
        if let Err(error) = watch(watcher, &[Signal::SIGINT], is_heard, on_signal) {
            tracing::warn!("Ctrl-C will end this process at once: {error}");
        }
        heard
    }

    /// Whether one has come since the last call.
    pub fn take(&self) -> bool {
        self.is_asked.swap(false, Ordering::AcqRel)
    }
}
