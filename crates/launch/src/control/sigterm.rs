//! SIGTERM, which launchers send to all ranks when one has died: the message about that one should still come out.

use std::sync::{Arc, Mutex, Once, Weak};
use std::time::Duration;

use nix::sys::signal::Signal;

use super::{Control, FailureKind};
use crate::lock::lock;
use crate::signal_pipe::{self, Watcher};

/// What a rank that was told to end waits for another one's death to be known. mpirun kills 2 s after it told.
const LIMIT: Duration = Duration::from_millis(1200);

/// The run of this process.
static CONTROL: Mutex<Weak<Control>> = Mutex::new(Weak::new());

/// Once for all runs of this process.
static WATCHES: Once = Once::new();

/// From now on SIGTERM ends this process a moment later: it first tells the other ranks and hears of those that died. Does
/// nothing where the program or its parent has chosen another way to meet the signal.
pub(super) fn watch(control: &Arc<Control>) {
    *lock(&CONTROL) = Arc::downgrade(control);
    WATCHES.call_once(|| {
        let on_signal = |_| {
            let control = lock(&CONTROL).upgrade();
            if let Some(control) = control {
                let why = "signal SIGTERM, from its launcher, a scheduler or a user";
                control.end(FailureKind::Terminated, why, LIMIT);
            }
            true
        };
        let watcher = (Watcher::Control, "control-term");
        let (signals, replaces) = (&[Signal::SIGTERM], signal_pipe::ends_process);
        if let Err(error) = signal_pipe::watch(watcher, signals, replaces, on_signal) {
            tracing::warn!("SIGTERM will end this rank without a word to the others: {error}");
        }
    });
}
