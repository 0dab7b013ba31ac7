//! Signals as bytes of a pair of sockets, which a thread reads: a handler may do nothing else.

use std::io::{Read, Result};
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc;

use nix::sys::signal::{self, SaFlags, SigAction, SigHandler, SigSet, Signal};

/// Where the handlers of each watcher write; -1 before they are set.
static PIPES: [AtomicI32; 3] = [const { AtomicI32::new(-1) }; 3];

/// Who watches signals, once each.
#[derive(Clone, Copy)]
pub(crate) enum Watcher {
    /// A program that stops well.
    Stop,
    /// A rank that tells the others.
    Control,
    /// A launcher or an agent, which ends what it has started.
    Launcher,
}

/// From now on `on_signal` hears of each of these signals, on a thread of the watcher's name; where it says so, the signal then does what
/// it did before. Those stay as they are whose handler is not one that this `replaces`.
pub(crate) fn watch(
    (watcher, name): (Watcher, &str),
    signals: &[Signal],
    replaces: fn(SigHandler) -> bool,
    on_signal: impl FnMut(Signal) -> bool + Send + 'static,
) -> Result<()> {
    let (reader, writer) = UnixStream::pair()?;
    writer.set_nonblocking(true)?;
    let (set, before) = mpsc::channel();
    let thread = std::thread::Builder::new().name(name.to_string());
    thread.spawn(move || receive(reader, &before.iter().collect::<Vec<_>>(), on_signal))?;
    // Open until the process ends, as the handler may run until then.
    PIPES[watcher as usize].store(writer.into_raw_fd(), Ordering::Release);
    let handler = match watcher {
        Watcher::Stop => on_signal_of::<{ Watcher::Stop as usize }>,
        Watcher::Control => on_signal_of::<{ Watcher::Control as usize }>,
        Watcher::Launcher => on_signal_of::<{ Watcher::Launcher as usize }>,
    };
    let handler = SigHandler::Handler(handler);
    let action = SigAction::new(handler, SaFlags::SA_RESTART, SigSet::empty());
    for signal in signals {
        let earlier = set_action(*signal, &action)?;
        // One that comes between is not known, and has no effect.
        match replaces(earlier.handler()) {
            true => drop(set.send((*signal, earlier))),
            false => drop(set_action(*signal, &earlier)?),
        }
    }
    Ok(())
}

fn receive(
    mut reader: UnixStream,
    before: &[(Signal, SigAction)],
    mut on_signal: impl FnMut(Signal) -> bool,
) {
    let mut number = [0];
    // It fails if the other end is gone, which is never.
    while reader.read_exact(&mut number).is_ok() {
        let known = before.iter().find(|(signal, _)| *signal as u8 == number[0]);
        if let Some((signal, earlier)) = known
            && on_signal(*signal)
        {
            let ended = set_action(*signal, earlier).and_then(|_| signal::raise(*signal));
            if let Err(error) = ended {
                tracing::error!("{signal} does not end this process: {error}");
            }
        }
    }
}

#[allow(unsafe_code)]
fn set_action(signal: Signal, action: &SigAction) -> nix::Result<SigAction> {
    // SAFETY: the handler is `on_signal_of`, which only does what a signal handler may, or what was there before.
    unsafe { signal::sigaction(signal, action) }
}

#[allow(unsafe_code)]
extern "C" fn on_signal_of<const WATCHER: usize>(number: std::ffi::c_int) {
    // SAFETY: the descriptor is open until the process ends (`watch` gave it up); it is one before the handler is set.
    let pipe = unsafe { BorrowedFd::borrow_raw(PIPES[WATCHER].load(Ordering::Acquire)) };
    // A write is allowed in a signal handler, and this one never blocks: if there is no room the thread has been woken often enough.
    let _ = nix::unistd::write(pipe, &[number as u8]);
}
