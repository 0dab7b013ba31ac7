//! SIGINT, SIGTERM, SIGHUP and SIGUSR1 as a wish that the program fulfils when it can.

use std::io::{IsTerminal, stderr};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::control::{print_aside, print_in_time};
use crate::signal_pipe::{Watcher, ends_process, ignore_file_size_signal, is_heard, watch};

/// What asks a program to stop. `mpirun` passes only the last one on without killing a moment later.
pub(crate) const STOPPING: [Signal; 4] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGUSR1,
];

/// Terminals, launchers and `timeout` may deliver a signal twice; only after this time is it a second one.
const REPEAT_WAIT: Duration = Duration::from_secs(1);

/// How long what a process leaves behind may take to be removed.
const CLEANING: Duration = Duration::from_secs(10);

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
    /// it ends the process. One that is ignored, as SIGINT is in the background of a shell and SIGHUP under `nohup`, stays ignored.
    ///
    /// A write beyond the limit on the size of files is an error from now on, as one to a full disk is.
    ///
    /// At either one what `say` makes of its name, and of whether it is the second, is printed on standard error.
    pub fn defer(
        say: impl Fn(&str, bool) -> Option<String> + Send + Sync + 'static,
    ) -> &'static Self {
        DEFERRED.get_or_init(|| {
            ignore_file_size_signal();
            let stop = Self::default();
            let (first, say) = (stop.first.clone(), Arc::new(say));
            let mut first_at: Option<Instant> = None;
            let on_signal = move |signal: Signal| {
                let is_again = first_at.is_some();
                if first_at.is_some_and(|at| at.elapsed() < REPEAT_WAIT) {
                    return false;
                }
                let say = say.clone();
                let say = move || say(signal.as_str(), is_again);
                let text = in_time("said-of-signal", REPEAT_WAIT, say);
                let text = text.flatten().map(line);
                match is_again {
                    true => text.into_iter().for_each(print_in_time),
                    false => {
                        first.store(signal as i32, Ordering::Release);
                        first_at = Some(Instant::now());
                        text.into_iter().for_each(print_aside);
                    }
                }
                is_again
            };
            let watcher = (Watcher::Stop, "stop-signals");
            if let Err(error) = watch(watcher, &STOPPING, is_heard, on_signal) {
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

/// From now on `clean` is called before one of these signals ends this process, as it would do now, and is waited for no longer than 10 s: a
/// file system may not answer. Those stay as they are that are ignored, or that a program handles itself.
pub fn before_ending(clean: impl FnOnce() + Send + 'static) {
    let mut clean = Some(clean);
    let on_signal = move |_| {
        if let Some(clean) = clean.take() {
            in_time("cleaning", CLEANING, clean);
        }
        true
    };
    let watcher = (Watcher::Cleaner, "cleaner");
    if let Err(error) = watch(watcher, &STOPPING, ends_process, on_signal) {
        tracing::warn!("what a signal ends may leave files for locks behind: {error}");
    }
}

/// What `work` gives within this time, on a thread of this name, which goes on if that takes longer: a folder may not
/// answer, say, and a signal has its effect all the same.
pub fn in_time<T: Send + 'static>(
    name: &str,
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (done, is_done) = mpsc::channel();
    let thread = std::thread::Builder::new().name(name.into());
    thread.spawn(move || done.send(work())).ok()?;
    is_done.recv_timeout(limit).ok()
}

/// On a terminal not behind what is there already: `^C`, or a bar.
fn line(text: String) -> String {
    match stderr().is_terminal() {
        true => format!("\n{text}\n"),
        false => format!("{text}\n"),
    }
}
