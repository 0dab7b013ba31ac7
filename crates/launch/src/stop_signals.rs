//! SIGINT, SIGTERM and SIGUSR1 as a wish that the program fulfils when it can.

use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use nix::sys::signal::{SigHandler, Signal};

use crate::signal_pipe::{Watcher, watch};

/// What asks a program to stop. `mpirun` passes only the last one on without killing a moment later.
pub(crate) const STOPPING: [Signal; 3] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGUSR1];

/// Terminals, launchers and `timeout` may deliver a signal twice; only after this time is it a second one.
const REPEAT_WAIT: Duration = Duration::from_secs(1);

/// Those of this process.
static DEFERRED: OnceLock<StopSignals> = OnceLock::new();

/// The signals of this process that ask it to stop.
#[derive(Debug, Default)]
pub struct StopSignals {
    /// Number of the first one; 0: none.
    first: Arc<AtomicI32>,
}

impl StopSignals {
    /// From now on the first signal is only noted, and a second one, a second later or more, does what the first would have done before:
    /// it ends the process. One that is ignored, as SIGINT is in the background of a shell, stays ignored.
    pub fn defer() -> &'static Self {
        DEFERRED.get_or_init(|| {
            let stop = Self::default();
            let first = stop.first.clone();
            let mut first_at = None;
            let on_signal = move |signal| match first_at {
                None => {
                    first.store(signal as i32, Ordering::Release);
                    first_at = Some(Instant::now());
                    false
                }
                Some(at) => at.elapsed() >= REPEAT_WAIT,
            };
            let replaces = |before| !matches!(before, SigHandler::SigIgn);
            let watcher = (Watcher::Stop, "stop-signals");
            if let Err(error) = watch(watcher, &STOPPING, replaces, on_signal) {
                tracing::warn!("signals will end this process at once: {error}");
            }
            stop
        })
    }

    /// The name and number of the signal that came first, if one has.
    pub fn received(&self) -> Option<(&'static str, u8)> {
        let signal = Signal::try_from(self.first.load(Ordering::Acquire)).ok()?;
        Some((signal.as_str(), signal as u8))
    }
}
