//! SIGTERM, which launchers send to all ranks when one has died: the message about that one should still come out.

use std::io::{PipeReader, Read};
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use nix::sys::signal::{self, SaFlags, SigAction, SigHandler, SigSet, Signal};

use super::Control;

/// What a rank that was told to end waits for another one's death to be known. mpirun kills 2 s after it told.
const LIMIT: Duration = Duration::from_millis(1200);

/// Where the handler writes; -1 before there is a pipe.
static PIPE: AtomicI32 = AtomicI32::new(-1);

/// The run of this process.
static CONTROL: Mutex<Weak<Control>> = Mutex::new(Weak::new());

/// From now on SIGTERM ends this process a moment later: it first tells the other ranks and hears of those that died. Does
/// nothing where the program or its parent has chosen another way to meet the signal.
pub(super) fn watch(control: &Arc<Control>) {
    let mut current = CONTROL.lock().unwrap_or_else(PoisonError::into_inner);
    *current = Arc::downgrade(control);
    drop(current);
    if PIPE.load(Ordering::Acquire) >= 0 {
        return;
    }
    if let Err(error) = install() {
        tracing::warn!("SIGTERM will end this rank without a word to the others: {error}");
    }
}

fn install() -> std::io::Result<()> {
    let (reader, writer) = std::io::pipe()?;
    std::thread::Builder::new()
        .name("control-term".into())
        .spawn(move || wait_for_signal(reader))?;
    // Open until the process ends, as the handler may run until then.
    PIPE.store(writer.into_raw_fd(), Ordering::Release);
    let handler = SigHandler::Handler(on_signal);
    let action = SigAction::new(handler, SaFlags::SA_RESTART, SigSet::empty());
    let before = set_action(&action)?;
    if !matches!(before.handler(), SigHandler::SigDfl) {
        set_action(&before)?;
    }
    Ok(())
}

#[allow(unsafe_code)]
fn set_action(action: &SigAction) -> nix::Result<SigAction> {
    // SAFETY: the handler is `on_signal`, which only does what a signal handler may, or what was there before.
    unsafe { signal::sigaction(Signal::SIGTERM, action) }
}

#[allow(unsafe_code)]
extern "C" fn on_signal(_: std::ffi::c_int) {
    // SAFETY: the descriptor is open until the process ends (`install` gave it up); it is one before the handler is set.
    let pipe = unsafe { BorrowedFd::borrow_raw(PIPE.load(Ordering::Acquire)) };
    // A write is allowed in a signal handler. If the pipe is full the thread has been woken often enough.
    let _ = nix::unistd::write(pipe, &[0]);
}

fn wait_for_signal(mut reader: PipeReader) {
    // It fails if the pipe is gone, which is never.
    while reader.read_exact(&mut [0]).is_ok() {
        let current = CONTROL.lock().unwrap_or_else(PoisonError::into_inner);
        let control = current.upgrade();
        drop(current);
        if let Some(control) = &control {
            control.terminate(LIMIT);
        }
        end_by_signal();
    }
}

fn end_by_signal() {
    let action = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
    let ended = set_action(&action).and_then(|_| signal::raise(Signal::SIGTERM));
    if let Err(error) = ended {
        tracing::error!("SIGTERM does not end this process: {error}");
    }
}
