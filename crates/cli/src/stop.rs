//! When a run stops before its last step, and what it says then.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use candle_launch::StopSignals;
use candle_launch::launcher::quoted;

/// How a run was stopped.
pub(crate) struct Stopped {
    /// Steps that were done.
    pub step: usize,
    /// What it left, if not the model.
    pub checkpoint: Option<PathBuf>,
    /// The flag that takes what is in the output folder.
    pub output_flag: &'static str,
}

/// The command line of this process, in a shell's words, with the flag that resumes.
fn command_that_resumes() -> String {
    let mut words: Vec<String> = Vec::new();
    let mut args = std::env::args_os().map(|arg| arg.to_string_lossy().into_owned());
    while let Some(arg) = args.next() {
        if arg == "--resume" {
            args.next();
        } else if !arg.starts_with("--resume=") {
            words.push(quoted(&arg));
        }
    }
    words.push("--resume latest".to_string());
    words.join(" ")
}

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

    /// Whether there are steps, or have been.
    pub fn has_begun(&self) -> bool {
        self.signals.get().is_some()
    }

    fn signal(&self) -> Option<(&'static str, u8)> {
        self.signals.get()?.received()
    }

    /// Why the run was stopped, and how to go on; `output` holds the model as it is if there is no checkpoint. A process that
    /// `is_alone` has all ranks.
    pub fn describe(
        &self,
        stopped: &Stopped,
        num_steps: usize,
        (output, is_alone): (&Path, bool),
    ) -> String {
        let why = match (self.signal(), self.max_secs) {
            (Some((signal, _)), _) => signal.to_string(),
            (None, Some(secs)) if self.is_time_over() => format!("--max-secs {secs}"),
            (None, _) => "a signal to another rank".to_string(),
        };
        let step = stopped.step;
        let how = match &stopped.checkpoint {
            Some(_) if is_alone => format!("to go on: {}", command_that_resumes()),
            Some(_) => "to go on, start the ranks as before, with --resume latest".to_string(),
            None => format!(
                "{} {} trains this further, from its own step 1",
                stopped.output_flag,
                output.display()
            ),
        };
        format!("stopped after step {step} of {num_steps} by {why}; {how}")
    }

    fn is_time_over(&self) -> bool {
        let max = self.max_secs.map(Duration::from_secs);
        max.is_some_and(|max| self.start.elapsed() >= max)
    }

    /// 128 and the number of the signal, that of SIGTERM if another rank got it; success if the time was over.
    pub fn exit_code(&self) -> ExitCode {
        match self.signal() {
            Some((_, number)) => ExitCode::from(128 + number),
            // The clock of another rank may have been the first.
            None if self.max_secs.is_some() => ExitCode::SUCCESS,
            None => ExitCode::from(128 + 15),
        }
    }
}
