//! SIGINT, SIGTERM and SIGUSR1 as a wish that the program fulfils when it can.

use std::io::{PipeReader, Read, Result};
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use nix::sys::signal::{self, SaFlags, SigAction, SigHandler, SigSet, Signal};

/// What asks a program to stop. `mpirun` passes only the last one on without killing a moment later.
const STOPPING: [Signal; 3] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGUSR1];

/// Terminals, launchers and `timeout` may deliver a signal twice; only after this time is it a second one.
const REPEAT_WAIT: Duration = Duration::from_secs(1);

/// Where the handler writes; -1 before there is a pipe.
static PIPE: AtomicI32 = AtomicI32::new(-1);

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
            if let Err(error) = stop.install() {
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

    fn install(&self) -> Result<()> {
        let (reader, writer) = std::io::pipe()?;
        // Open until the process ends, as the handler may run until then.
        PIPE.store(writer.into_raw_fd(), Ordering::Release);
        let handler = SigHandler::Handler(on_signal);
        let action = SigAction::new(handler, SaFlags::SA_RESTART, SigSet::empty());
        let mut before = Vec::new();
        for signal in STOPPING {
            let earlier = set_action(signal, &action)?;
            if matches!(earlier.handler(), SigHandler::SigIgn) {
                set_action(signal, &earlier)?;
            }
            before.push((signal, earlier));
        }
        let first = self.first.clone();
        let thread = std::thread::Builder::new().name("stop-signals".into());
        let earlier = before.clone();
        let spawned = thread.spawn(move || receive(reader, &first, &before));
        if let Err(error) = spawned {
            // Nobody would hear them.
            for (signal, action) in &earlier {
                set_action(*signal, action)?;
            }
            return Err(error);
        }
        Ok(())
    }
}

/// Notes the first signal and ends the process by the second.
fn receive(mut reader: PipeReader, first: &AtomicI32, before: &[(Signal, SigAction)]) {
    let mut first_at: Option<Instant> = None;
    let mut number = [0];
    // It fails if the pipe is gone, which is never.
    while reader.read_exact(&mut number).is_ok() {
        match first_at {
            None => {
                first.store(number[0].into(), Ordering::Release);
                first_at = Some(Instant::now());
            }
            Some(at) if at.elapsed() < REPEAT_WAIT => {}
            Some(_) => {
                let signal = before.iter().find(|(signal, _)| *signal as u8 == number[0]);
                let Some((signal, earlier)) = signal else {
                    continue;
                };
                let ended = set_action(*signal, earlier).and_then(|_| signal::raise(*signal));
                if let Err(error) = ended {
                    tracing::error!("{signal} does not end this process: {error}");
                }
            }
        }
    }
}

#[allow(unsafe_code)]
fn set_action(signal: Signal, action: &SigAction) -> nix::Result<SigAction> {
    // SAFETY: the handler is `on_signal`, which only does what a signal handler may, or what was there before.
    unsafe { signal::sigaction(signal, action) }
}

#[allow(unsafe_code)]
extern "C" fn on_signal(number: std::ffi::c_int) {
    // SAFETY: the descriptor is open until the process ends (`install` gave it up); it is one before the handler is set.
    let pipe = unsafe { BorrowedFd::borrow_raw(PIPE.load(Ordering::Acquire)) };
    // A write is allowed in a signal handler; if the pipe is full there is no need for another one.
    let _ = nix::unistd::write(pipe, &[number as u8]);
}
