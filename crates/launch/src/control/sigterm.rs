//! SIGTERM, which launchers send to all ranks when one has died: the message about that one should still come out.

use std::sync::{Arc, Mutex, Once, PoisonError, Weak};
use std::time::Duration;

use nix::sys::signal::Signal;

use super::Control;
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
    let mut current = CONTROL.lock().unwrap_or_else(PoisonError::into_inner);
    *current = Arc::downgrade(control);
    drop(current);
    WATCHES.call_once(|| {
        let on_signal = |_| {
            let current = CONTROL.lock().unwrap_or_else(PoisonError::into_inner);
            let control = current.upgrade();
            drop(current);
            if let Some(control) = control {
                control.terminate(LIMIT);
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
