//! When a run stops before its last step, and what it says then.

use std::path::Path;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use candle_launch::StopSignals;

/// What may stop a run between two steps.
pub(crate) struct Stop {
    start: Instant,
    max_secs: Option<u64>,
    /// Once there are steps.
    signals: OnceLock<&'static StopSignals>,
}

impl Stop {
    /// Of a run that begins now. Until there are steps signals end the process.
    pub fn new(max_secs: Option<u64>) -> Self {
        Self {
            start: Instant::now(),
            max_secs,
            signals: OnceLock::new(),
        }
    }

    /// From now on a signal stops the run between two steps; the question, asked in each of them, whether it is time.
    pub fn asks(&self) -> impl Fn() -> bool + Send + use<> {
        let signals = *self.signals.get_or_init(StopSignals::defer);
        let start = self.start;
        let max = self.max_secs.map(Duration::from_secs);
        move || signals.received().is_some() || max.is_some_and(|max| start.elapsed() >= max)
    }

    fn signal(&self) -> Option<(&'static str, u8)> {
        self.signals.get()?.received()
    }

    /// Why the run was stopped after `step` steps, and how to go on; `output` holds the model as it is.
    pub fn describe(&self, step: usize, num_steps: usize, output: &Path) -> String {
        let why = match (self.signal(), self.max_secs) {
            (Some((signal, _)), _) => signal.to_string(),
            (None, Some(secs)) => format!("--max-secs {secs}"),
            (None, None) => "a signal to another rank".to_string(),
        };
        format!(
            "stopped after step {step} of {num_steps} by {why}; --model {} trains this model further, from its own step 1",
            output.display()
        )
    }

    /// 128 and the number of the signal; success if the time was over.
    pub fn exit_code(&self) -> ExitCode {
        match self.signal() {
            Some((_, number)) => ExitCode::from(128 + number),
            None => ExitCode::SUCCESS,
        }
    }
}
