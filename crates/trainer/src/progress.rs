//! Progress on the terminal: a bar where stderr is one, else a plain line now and then, for logs and CI.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar, ProgressStyle};

use crate::{Activity, Staleness, StepMetrics};

/// Longest silence between two plain lines while steps go by.
const LINE_INTERVAL: Duration = Duration::from_secs(5);
/// Plain lines a run prints at least, however short.
const NUM_LINES: usize = 10;

/// Shows how far a run is: step, loss, positions and tokens with loss per second, learning rate, steps that were skipped, and the time left.
pub struct Progress {
    num_steps: usize,
    view: View,
    /// What is done between two steps, in a log.
    activity: Option<Activity>,
}

enum View {
    Bar(ProgressBar),
    Lines(Lines),
}

struct Lines {
    out: Box<dyn Write + Send>,
    start: Instant,
    /// Steps that were done before its first one.
    num_before: Option<usize>,
    last_line: Option<Instant>,
}

impl Progress {
    /// Progress of a run of `num_steps` steps on stderr.
    pub fn new(num_steps: usize) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self::to_writer(num_steps, Box::new(std::io::stderr()));
        }
        let bar = ProgressBar::new(num_steps as u64);
        // The template is a constant; should indicatif ever refuse it, its own style still shows the progress.
        if let Ok(style) = ProgressStyle::with_template("{bar:30} step {pos}/{len} {msg} eta {eta}")
        {
            bar.set_style(style);
        }
        Self {
            num_steps,
            view: View::Bar(bar),
            activity: None,
        }
    }

    /// Plain lines to `out`: for the first and the last step, every tenth of the run and every 5 seconds.
    pub fn to_writer(num_steps: usize, out: Box<dyn Write + Send>) -> Self {
        let lines = Lines {
            out,
            start: Instant::now(),
            num_before: None,
            last_line: None,
        };
        Self {
            num_steps,
            view: View::Lines(lines),
            activity: None,
        }
    }

    /// Shows what is done until the next step, line or end.
    pub fn between_steps(&mut self, what: &str) {
        match &self.view {
            View::Bar(bar) => bar.set_message(what.to_string()),
            View::Lines(_) => self.activity = Some(Activity::start(what)),
        }
    }

    /// Shows a finished step. A terminal that cannot be written to does not end a run: errors are ignored.
    pub fn update(&mut self, metrics: &StepMetrics) {
        self.activity = None;
        let mut message = format!(
            "loss {:.4} {:.0} positions/s {:.0} loss tokens/s lr {:.2e}",
            metrics.loss, metrics.positions_per_sec, metrics.tokens_per_sec, metrics.learning_rate
        );
        if metrics.skipped_steps > 0 {
            let StepMetrics {
                skipped_steps,
                loss_scale,
                ..
            } = metrics;
            message += &format!(" {skipped_steps} skipped, loss scale {loss_scale}");
        }
        if let Some(Staleness { mean, max }) = metrics.staleness {
            message += &format!(" staleness {mean:.1} (max {max})");
        }
        match &mut self.view {
            View::Bar(bar) => {
                bar.set_message(message);
                bar.set_position(metrics.global_step as u64);
            }
            View::Lines(lines) => lines.update(metrics.global_step, self.num_steps, &message),
        }
    }

    /// Prints `line` above the bar, or among the plain lines.
    pub fn println(&mut self, line: &str) {
        self.activity = None;
        match &mut self.view {
            View::Bar(bar) => bar.println(line),
            View::Lines(lines) => drop(writeln!(lines.out, "{line}")),
        }
    }

    /// Ends the display and leaves its last state visible.
    pub fn finish(&mut self) {
        self.activity = None;
        match &mut self.view {
            View::Bar(bar) => bar.abandon(),
            View::Lines(lines) => drop(lines.out.flush()),
        }
    }
}

impl Lines {
    fn update(&mut self, num_done: usize, num_steps: usize, message: &str) {
        // A resumed run starts late: the time per step counts from its own first step.
        let num_before = *self.num_before.get_or_insert(num_done.saturating_sub(1));
        let tenth = num_steps.div_ceil(NUM_LINES).max(1);
        let is_due = num_done >= num_steps
            || num_done.is_multiple_of(tenth)
            || self
                .last_line
                .is_none_or(|last| last.elapsed() >= LINE_INTERVAL);
        if !is_due {
            return;
        }
        self.last_line = Some(Instant::now());
        let secs_per_step = self.start.elapsed().as_secs_f64() / (num_done - num_before) as f64;
        let left_secs = secs_per_step * num_steps.saturating_sub(num_done) as f64;
        let left = HumanDuration(Duration::try_from_secs_f64(left_secs).unwrap_or(Duration::MAX));
        // See `Progress::update`: a closed log is no reason to stop training.
        let _ = writeln!(
            self.out,
            "step {num_done}/{num_steps} {message} eta {left:#}"
        );
        let _ = self.out.flush();
    }
}
