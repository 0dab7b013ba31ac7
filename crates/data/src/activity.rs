//! What a program does beside its steps, shown while it lasts: a line that changes where stderr is a terminal, else a plain line now
//! and then, for logs.

use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use candle_parallel::checkpoint::size_in_words;
use indicatif::{ProgressBar, ProgressStyle};

/// What lasts less than this says nothing in a log.
const FIRST_LINE: Duration = Duration::from_secs(1);
/// Silence between two plain lines.
const LINE_INTERVAL: Duration = Duration::from_secs(5);
/// Between two looks on a terminal.
const TICK: Duration = Duration::from_millis(100);

/// Something that takes a while, shown until this is dropped.
#[derive(Debug)]
pub struct Activity {
    /// Its end is what the thread waits for.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// What is shown.
struct View {
    name: String,
    /// Bytes that are done.
    done: Option<Box<dyn Fn() -> u64 + Send>>,
    total: Option<u64>,
    start: Instant,
}

impl Activity {
    /// Shows `name`, and how long it lasts, on stderr.
    pub fn start(name: &str) -> Self {
        Self::show(name, None, None)
    }

    /// The same, and how many bytes are `done`, of `total` if that is known.
    pub fn of_bytes(name: &str, total: Option<u64>, done: Arc<AtomicU64>) -> Self {
        Self::of_bytes_by(name, total, move || done.load(Ordering::Relaxed))
    }

    /// As [`Self::of_bytes`], where `done` tells them.
    pub(crate) fn of_bytes_by(
        name: &str,
        total: Option<u64>,
        done: impl Fn() -> u64 + Send + 'static,
    ) -> Self {
        Self::show(name, total, Some(Box::new(done)))
    }

    fn show(name: &str, total: Option<u64>, done: Option<Box<dyn Fn() -> u64 + Send>>) -> Self {
        let view = View {
            name: name.to_string(),
            done,
            total,
            start: Instant::now(),
        };
        let is_terminal = std::io::stderr().is_terminal();
        let (stop, stopped) = channel::<()>();
        let wait = move |time| stopped.recv_timeout(time) == Err(RecvTimeoutError::Timeout);
        let thread = std::thread::Builder::new().name("activity".into());
        let thread = thread.spawn(move || match is_terminal {
            true => view.on_terminal(wait),
            false => view.in_lines(wait, &mut std::io::stderr()),
        });
        Self {
            stop: Some(stop),
            // Nothing is shown without one, and nothing else is wrong.
            thread: thread.ok(),
        }
    }
}

impl Drop for Activity {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It has no error to tell.
            let _ = thread.join();
        }
    }
}

impl View {
    fn line(&self) -> String {
        let done = self.done.as_ref().map(|done| done());
        let done = match (done, self.total) {
            (None, _) => String::new(),
            (Some(done), None) => format!("{}, ", size_in_words(done)),
            (Some(done), Some(total)) => {
                let (done, total) = (size_in_words(done), size_in_words(total));
                format!("{done} of {total}, ")
            }
        };
        format!("{}: {done}{} s", self.name, self.start.elapsed().as_secs())
    }

    /// `wait` is false when it is over.
    fn on_terminal(&self, wait: impl Fn(Duration) -> bool) {
        let bar = ProgressBar::new_spinner();
        // The template is a constant; should indicatif ever refuse it, its own style still shows the message.
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg}") {
            bar.set_style(style);
        }
        while wait(TICK) {
            bar.set_message(self.line());
            bar.tick();
        }
        bar.finish_and_clear();
    }

    fn in_lines(&self, wait: impl Fn(Duration) -> bool, out: &mut impl Write) {
        let mut silence = FIRST_LINE;
        while wait(silence) {
            // A log that cannot be written to is no reason to stop.
            let _ = writeln!(out, "{}", self.line());
            silence = LINE_INTERVAL;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::time::{Duration, Instant};

    use super::{FIRST_LINE, LINE_INTERVAL, View};

    #[test]
    fn lines_of_a_log() {
        let view = View {
            name: "saving".into(),
            done: Some(Box::new(|| 12_340_000)),
            total: Some(45_600_000),
            start: Instant::now(),
        };
        let num_waits = Cell::new(0);
        let wait = |time: Duration| {
            num_waits.set(num_waits.get() + 1);
            assert_eq!(
                time,
                if num_waits.get() == 1 {
                    FIRST_LINE
                } else {
                    LINE_INTERVAL
                }
            );
            num_waits.get() < 3
        };
        let mut out = Vec::new();
        view.in_lines(wait, &mut out);
        let line = "saving: 12.3 MB of 45.6 MB, 0 s\n";
        assert_eq!(String::from_utf8(out).unwrap(), line.repeat(2));
    }
}
