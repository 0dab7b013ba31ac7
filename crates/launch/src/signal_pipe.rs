//! Signals as bytes of a pair of sockets, which a thread reads: a handler may do nothing else.

use std::io::{Read, Result};
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc;

use nix::errno::Errno;
use nix::sys::signal::{self, SaFlags, SigAction, SigHandler, SigSet, Signal};

/// Where the handlers of each watcher write; -1 before they are set.
static PIPES: [AtomicI32; 5] = [const { AtomicI32::new(-1) }; 5];

/// Who watches signals, once each.
#[derive(Clone, Copy)]
pub(crate) enum Watcher {
    /// A program that stops well.
    Stop,
    /// A rank that tells the others.
    Control,
    /// A launcher or an agent, which ends what it has started.
    Launcher,
    /// A program that leaves nothing behind when it is ended.
    Cleaner,
    /// A program of which one answer is ended.
    Interrupts,
}

impl Watcher {
    fn handler(self) -> Handler {
        match self {
            Self::Stop => on_signal_of::<{ Self::Stop as usize }>,
            Self::Control => on_signal_of::<{ Self::Control as usize }>,
            Self::Launcher => on_signal_of::<{ Self::Launcher as usize }>,
            Self::Cleaner => on_signal_of::<{ Self::Cleaner as usize }>,
            Self::Interrupts => on_signal_of::<{ Self::Interrupts as usize }>,
        }
    }
}

type Handler = extern "C" fn(std::ffi::c_int);

/// Whether a signal that has this handler ends the process, after what it leaves has been removed or as it is.
pub(crate) fn ends_process(handler: SigHandler) -> bool {
    match handler {
        SigHandler::SigDfl => true,
        SigHandler::Handler(handler) => std::ptr::fn_addr_eq(handler, Watcher::Cleaner.handler()),
        _ => false,
    }
}

/// Whether a signal that has this handler is one to hear: one that is ignored, as SIGHUP is under `nohup`, stays so.
pub(crate) fn is_heard(handler: SigHandler) -> bool {
    !matches!(handler, SigHandler::SigIgn)
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
    let handler = SigHandler::Handler(watcher.handler());
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

/// From now on a write beyond the limit on the size of files (`ulimit -f`) is an error, as one to a full disk is, and does not end the process.
/// A handler that is there already stays.
pub fn ignore_file_size_signal() {
    let ignore = SigAction::new(SigHandler::SigIgn, SaFlags::empty(), SigSet::empty());
    let earlier = set_action(Signal::SIGXFSZ, &ignore);
    if let Ok(earlier) = earlier
        && !matches!(earlier.handler(), SigHandler::SigDfl)
    {
        // It was there a moment ago.
        let _ = set_action(Signal::SIGXFSZ, &earlier);
    }
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
    // SAFETY: the handler is `on_signal_of`, which only does what a signal handler may, none, or what was there before.
    unsafe { signal::sigaction(signal, action) }
}

#[allow(unsafe_code)]
extern "C" fn on_signal_of<const WATCHER: usize>(number: std::ffi::c_int) {
    // SAFETY: the descriptor is open until the process ends (`watch` gave it up); it is one before the handler is set.
    let pipe = unsafe { BorrowedFd::borrow_raw(PIPES[WATCHER].load(Ordering::Acquire)) };
    // What the signal interrupts may be about to look at the error of its last system call.
    let interrupted = Errno::last_raw();
    // A write is allowed in a signal handler, and this one never blocks: if there is no room the thread has been woken often enough.
    let _ = nix::unistd::write(pipe, &[number as u8]);
    Errno::set_raw(interrupted);
}
