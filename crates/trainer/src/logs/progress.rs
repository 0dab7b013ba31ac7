//! Progress on the terminal: a bar where stderr is one, else a plain line now and then, for logs and CI.

use std::collections::BTreeSet;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use console::Term;
use indicatif::{HumanDuration, ProgressBar, ProgressStyle};

use candle_data::Activity;

use super::step_metrics::StepMetrics;
use crate::parameter_server::Staleness;

/// Longest silence between two plain lines while steps go by.
const LINE_INTERVAL: Duration = Duration::from_secs(5);
/// Plain lines a run prints at least, however short.
const NUM_LINES: usize = 10;
/// Columns of a bar.
const MIN_BAR: usize = 10;
const MAX_BAR: usize = 30;

/// Shows how far a run is: step, loss, positions and tokens with loss per second, learning rate, steps that were skipped, and the time left;
/// on a terminal in one line, of which what matters least is left out where there is no room.
pub struct Progress {
    num_steps: usize,
    start: Instant,
    /// Steps that were done before its first one.
    num_before: Option<usize>,
    num_done: usize,
    /// What is shown of the last step.
    last: Vec<Part>,
    view: View,
    /// What is done between two steps, in a log.
    activity: Option<Activity>,
}

/// A part of the line about a step.
#[derive(Clone)]
struct Part {
    text: String,
    need: Need,
}

/// How much a part is needed: the last ones have room first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Need {
    TargetRate,
    Bar,
    PositionRate,
    Trouble,
    LearningRate,
    TimeLeft,
    Activity,
    Always,
}

enum View {
    Bar(ProgressBar),
    Lines {
        out: Box<dyn Write + Send>,
        last_line: Option<Instant>,
    },
}

impl Part {
    fn new(need: Need, text: impl Into<String>) -> Self {
        let text = text.into();
        Self { text, need }
    }
}

impl Progress {
    /// Progress of a run of `num_steps` steps on stderr.
    pub fn new(num_steps: usize) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self::to_writer(num_steps, Box::new(std::io::stderr()));
        }
        let bar = ProgressBar::new(num_steps as u64);
        // The template is a constant; should indicatif ever refuse it, its own style still shows the progress.
        if let Ok(style) = ProgressStyle::with_template("{msg}") {
            bar.set_style(style);
        }
        Self::with_view(num_steps, View::Bar(bar))
    }

    /// Plain lines to `out`: for the first and the last step, every tenth of the run and every 5 seconds.
    pub fn to_writer(num_steps: usize, out: Box<dyn Write + Send>) -> Self {
        let last_line = None;
        Self::with_view(num_steps, View::Lines { out, last_line })
    }

    fn with_view(num_steps: usize, view: View) -> Self {
        Self {
            num_steps,
            start: Instant::now(),
            num_before: None,
            num_done: 0,
            last: Vec::new(),
            view,
            activity: None,
        }
    }

    /// Shows what is done until the next step, line or end, beside the last step.
    pub fn between_steps(&mut self, what: &str) {
        match &self.view {
            View::Bar(bar) => self.draw(bar, Some(what)),
            View::Lines { .. } => self.activity = Some(Activity::start(what)),
        }
    }

    /// Shows a finished step. A terminal that cannot be written to does not end a run: errors are ignored.
    pub fn update(&mut self, metrics: &StepMetrics) {
        self.activity = None;
        self.num_done = metrics.global_step;
        self.last = self.parts(metrics);
        self.print_if_due();
        self.draw_last();
    }

    /// Prints the last step among plain lines, if it is time for one.
    fn print_if_due(&mut self) {
        let View::Lines { out, last_line } = &mut self.view else {
            return;
        };
        let tenth = self.num_steps.div_ceil(NUM_LINES).max(1);
        let is_due = self.num_done >= self.num_steps
            || self.num_done.is_multiple_of(tenth)
            || last_line.is_none_or(|last| last.elapsed() >= LINE_INTERVAL);
        if is_due {
            *last_line = Some(Instant::now());
            // A closed log is no reason to stop training.
            let _ = writeln!(out, "{}", joined(&self.last));
            let _ = out.flush();
        }
    }

    fn parts(&mut self, metrics: &StepMetrics) -> Vec<Part> {
        // A resumed run starts late: the time per step counts from its own first step.
        let num_before = *self
            .num_before
            .get_or_insert(self.num_done.saturating_sub(1));
        let secs = self.start.elapsed().as_secs_f64();
        let secs_per_step = secs / self.num_done.saturating_sub(num_before).max(1) as f64;
        let left_secs = secs_per_step * self.num_steps.saturating_sub(self.num_done) as f64;
        let left = HumanDuration(Duration::try_from_secs_f64(left_secs).unwrap_or(Duration::MAX));
        let mut parts = vec![
            Part::new(
                Need::Always,
                format!("step {}/{}", self.num_done, self.num_steps),
            ),
            Part::new(Need::Always, format!("loss {:.4}", metrics.loss)),
            Part::new(
                Need::PositionRate,
                format!("{:.0} positions/s", metrics.positions_per_sec),
            ),
            Part::new(
                Need::TargetRate,
                format!("{:.0} loss tokens/s", metrics.tokens_per_sec),
            ),
            Part::new(
                Need::LearningRate,
                format!("lr {:.2e}", metrics.learning_rate),
            ),
        ];
        if metrics.skipped_steps > 0 {
            let StepMetrics {
                skipped_steps,
                loss_scale,
                ..
            } = metrics;
            let skipped = format!("{skipped_steps} skipped, loss scale {loss_scale}");
            parts.push(Part::new(Need::Trouble, skipped));
        }
        if let Some(Staleness { mean, max }) = metrics.staleness {
            let staleness = format!("staleness {mean:.1} (max {max})");
            parts.push(Part::new(Need::Trouble, staleness));
        }
        parts.push(Part::new(Need::TimeLeft, format!("eta {left:#}")));
        parts
    }

    /// Shows the last step again, and what is done beside.
    fn draw(&self, bar: &ProgressBar, doing: Option<&str>) {
        let share = self.num_done as f64 / self.num_steps.max(1) as f64;
        let doing = doing.map(|what| Part::new(Need::Activity, what));
        let parts: Vec<Part> = self.last.iter().cloned().chain(doing).collect();
        let (_, columns) = Term::stderr().size();
        // In the last column some terminals begin the next line.
        bar.set_message(fitted(
            &parts,
            share,
            usize::from(columns).saturating_sub(1),
        ));
    }

    fn draw_last(&self) {
        if let View::Bar(bar) = &self.view {
            self.draw(bar, None);
        }
    }

    /// Prints `line` above the bar, or among the plain lines.
    pub fn println(&mut self, line: &str) {
        self.activity = None;
        self.draw_last();
        match &mut self.view {
            View::Bar(bar) => bar.println(line),
            View::Lines { out, .. } => drop(writeln!(out, "{line}")),
        }
    }

    /// Ends the display and leaves its last state visible.
    pub fn finish(&mut self) {
        self.activity = None;
        self.draw_last();
        match &mut self.view {
            View::Bar(bar) => bar.abandon(),
            View::Lines { out, .. } => drop(out.flush()),
        }
    }
}

/// The parts that fit into so many columns, behind a bar of which this `share` is full.
fn fitted(parts: &[Part], share: f64, columns: usize) -> String {
    let width = |parts: &[Part]| joined(parts).chars().count();
    let mut all = vec![Part::new(Need::Bar, " ".repeat(MIN_BAR))];
    all.extend_from_slice(parts);
    let needs: BTreeSet<Need> = all.iter().map(|part| part.need).collect();
    let (mut kept, mut shown) = (Vec::new(), BTreeSet::new());
    for need in needs.into_iter().rev() {
        shown.insert(need);
        let more = all.iter().filter(|part| shown.contains(&part.need));
        let more: Vec<Part> = more.cloned().collect();
        if need == Need::Always || width(&more) <= columns {
            kept = more;
        } else {
            shown.remove(&need);
        }
    }
    let free = columns.saturating_sub(width(&kept));
    if let Some(bar) = kept.iter_mut().find(|part| part.need == Need::Bar) {
        let num_cells = (MIN_BAR + free).min(MAX_BAR);
        let num_full = (share.clamp(0.0, 1.0) * num_cells as f64) as usize;
        bar.text = "█".repeat(num_full) + &"░".repeat(num_cells - num_full);
    }
    joined(&kept).chars().take(columns).collect()
}

fn joined(parts: &[Part]) -> String {
    let texts: Vec<&str> = parts.iter().map(|part| part.text.as_str()).collect();
    texts.join(" ")
}

#[cfg(test)]
mod tests {
    use super::{Need, Part, fitted};

    /// A line of all parts, beside what is done between steps.
    fn line(columns: usize, doing: Option<&str>) -> String {
        let parts = [
            (Need::Always, "step 1200/3000"),
            (Need::Always, "loss 2.5000"),
            (Need::PositionRate, "4096 positions/s"),
            (Need::TargetRate, "2048 loss tokens/s"),
            (Need::LearningRate, "lr 1.00e-3"),
            (Need::Trouble, "3 skipped, loss scale 1024"),
            (Need::TimeLeft, "eta 3m"),
        ];
        let doing = doing.map(|what| (Need::Activity, what));
        let parts = parts.into_iter().chain(doing);
        let parts: Vec<Part> = parts.map(|(need, text)| Part::new(need, text)).collect();
        fitted(&parts, 0.4, columns)
    }

    #[test]
    fn the_line_fits_the_terminal_and_never_lacks_the_loss() {
        for columns in 0..200 {
            for doing in [None, Some("saving a checkpoint")] {
                let line = line(columns, doing);
                assert!(line.chars().count() <= columns, "{columns}: {line}");
                assert_eq!(line.contains("step 1200/3000 loss 2.5000"), columns >= 26);
            }
        }
        assert_eq!(line(39, None), "step 1200/3000 loss 2.5000 eta 3m");
        let saving = line(39, Some("saving a checkpoint"));
        assert_eq!(saving, "step 1200/3000 loss 2.5000 eta 3m");
        assert_eq!(
            line(79, None),
            "step 1200/3000 loss 2.5000 lr 1.00e-3 3 skipped, loss scale 1024 eta 3m"
        );
        assert_eq!(
            line(59, Some("evaluating")),
            "step 1200/3000 loss 2.5000 lr 1.00e-3 eta 3m evaluating"
        );
        let wide = line(160, None);
        let bar = "█".repeat(12) + &"░".repeat(18);
        assert!(wide.starts_with(&format!("{bar} step 1200/3000")), "{wide}");
        assert!(wide.contains("2048 loss tokens/s"), "{wide}");
    }
}
