//! When a run stops before its last step, and what it says then.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use candle_launch::launcher::quoted;
use candle_launch::{NOT_SAVED_EXIT_CODE, StopSignals, before_ending};
use candle_parallel::checkpoint::{CheckpointManifest, checkpoints_in, remove_leftovers};
use candle_trainer::counted;

use crate::output::observer::Observers;

/// How a run was stopped.
pub struct Stopped {
    /// Steps that were done.
    pub step: usize,
    pub left: Left,
    /// The flag that takes what is in the output folder.
    pub output_flag: &'static str,
}

/// What a run leaves that was stopped.
pub enum Left {
    Checkpoint(PathBuf),
    /// It has no folder for checkpoints.
    Model,
    /// The checkpoint could not be saved, nor, perhaps, the model in its place; from the checkpoint after `resumable` steps, if there is one,
    /// the run can go on.
    Unsaved {
        has_model: bool,
        resumable: Option<usize>,
    },
}

/// The steps that were done before the newest checkpoint in `save_dir`, from which `--resume latest` goes on.
pub fn newest_checkpoint(save_dir: &Path) -> Option<usize> {
    let folders = checkpoints_in(save_dir).ok()?;
    let mut manifests = folders
        .iter()
        .filter_map(|dir| CheckpointManifest::read(dir).ok());
    manifests.next().map(|manifest| manifest.step)
}

/// How far a run is, for what is said at a signal.
#[derive(Default)]
struct Position {
    num_done: AtomicUsize,
    /// The last step, counted from 1, that was found not to be the one to stop after.
    asked: AtomicUsize,
    /// In the process that speaks for all: its folder of checkpoints, and the steps of the run.
    of_run: OnceLock<(Option<PathBuf>, usize)>,
}

impl Position {
    /// What is said at a signal.
    fn tell(&self, signal: &str, is_again: bool) -> Option<String> {
        let (save_dir, num_steps) = self.of_run.get()?;
        let num_done = self.num_done.load(Ordering::Relaxed);
        if !is_again {
            let last = num_done.max(self.asked.load(Ordering::Relaxed)) + 1;
            let last = last.min(*num_steps);
            return Some(format!(
                "{signal}: step {last} is finished and saved first; again ends at once"
            ));
        }
        let saved = save_dir.as_deref().and_then(newest_checkpoint);
        let lost = match saved {
            Some(step) => format!(
                "what was done after step {step} is not saved; --resume latest goes on from there"
            ),
            None if num_done == 0 => "no step was done".to_string(),
            None => format!(
                "nothing of {} that were done is saved",
                counted(num_done, "step")
            ),
        };
        Some(format!("{signal} again: ended at once; {lost}"))
    }
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
pub struct Stop {
    start: Instant,
    max_secs: Option<u64>,
    /// Whether signals to the process are about this run.
    hears_signals: bool,
    /// Once there are steps; the signals, if it hears them.
    signals: OnceLock<Option<&'static StopSignals>>,
    position: Arc<Position>,
}

impl Stop {
    /// Of a run that begins now, in a program that does other things too: signals are none of its business.
    pub fn new(max_secs: Option<u64>) -> Self {
        Self {
            start: Instant::now(),
            max_secs,
            hears_signals: false,
            signals: OnceLock::new(),
            position: Arc::default(),
        }
    }

    /// Of a run that begins now and is what the program does. Until there are steps signals end the process.
    pub fn at_signals(max_secs: Option<u64>) -> Self {
        Self {
            hears_signals: true,
            ..Self::new(max_secs)
        }
    }

    /// Whether the run is what the program does.
    pub(crate) fn is_of_program(&self) -> bool {
        self.hears_signals
    }

    /// A signal that ends the process at once leaves none of the locks that it has made, and nothing that is not whole.
    pub fn cleans_up(&self) {
        if self.hears_signals {
            before_ending(remove_leftovers);
        }
    }

    /// This process tells at a signal what becomes of the run, of so many steps, whose checkpoints are in `save_dir`.
    pub fn speaks(&self, save_dir: Option<&Path>, num_steps: usize) {
        let of_run = (save_dir.map(Path::to_path_buf), num_steps);
        self.position.of_run.get_or_init(|| of_run);
    }

    /// So many steps are done.
    pub fn note(&self, num_done: usize) {
        self.position.num_done.store(num_done, Ordering::Relaxed);
    }

    /// From now on a signal stops the run between two steps, if it hears them; the question, asked in each of them, whether it is time.
    pub fn asks(&self, observers: &Observers) -> impl Fn() -> bool + Send + use<> {
        let asked = observers.ask_to_stop();
        let position = self.position.clone();
        let say = move |signal: &str, is_again| position.tell(signal, is_again);
        let hear = || self.hears_signals.then(|| StopSignals::defer(say));
        let signals = *self.signals.get_or_init(hear);
        let (start, position) = (self.start, self.position.clone());
        let max = self.max_secs.map(Duration::from_secs);
        move || {
            let step = position.num_done.load(Ordering::Relaxed) + 1;
            let is_time = max.is_some_and(|max| start.elapsed() >= max);
            let is_asked = signals.is_some_and(|signals| signals.received().is_some());
            let is_asked = is_asked || asked.load(Ordering::Relaxed);
            if !is_asked {
                position.asked.fetch_max(step, Ordering::Relaxed);
            }
            is_asked || is_time
        }
    }

    /// Whether there are steps, or have been.
    pub fn has_begun(&self) -> bool {
        self.signals.get().is_some()
    }

    fn signal(&self) -> Option<(&'static str, u8)> {
        (*self.signals.get()?)?.received()
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
            (None, Some(secs)) if self.start.elapsed() >= Duration::from_secs(secs) => {
                format!("--max-secs {secs}")
            }
            (None, _) if !self.hears_signals => "an observer".to_string(),
            (None, _) => "a signal to another rank".to_string(),
        };
        let step = stopped.step;
        let of_model = format!(
            "{} {} trains this further, from its own step 1",
            stopped.output_flag,
            output.display()
        );
        let how = match &stopped.left {
            Left::Checkpoint(_) if !self.hears_signals => {
                "to go on, run it again with checkpoints.resume = \"latest\"".to_string()
            }
            Left::Checkpoint(_) if is_alone => format!("to go on: {}", command_that_resumes()),
            Left::Checkpoint(_) => {
                "to go on, start the ranks as before, with --resume latest".to_string()
            }
            Left::Model => of_model,
            Left::Unsaved {
                has_model,
                resumable,
            } => {
                let resumable = match resumable {
                    Some(step) => format!("--resume latest goes on after step {step}"),
                    None => "there is none to resume from".to_string(),
                };
                let of_model = match has_model {
                    true => format!("; {of_model}"),
                    false => String::new(),
                };
                format!("its checkpoint could not be saved: {resumable}{of_model}")
            }
        };
        format!("stopped after step {step} of {num_steps} by {why}; {how}")
    }

    /// Of a run that `left` this: 128 and the number of the signal, that of SIGTERM if another rank got it; success if the time was over; but a
    /// code of its own if it is not saved.
    pub fn exit_code(&self, left: &Left) -> ExitCode {
        if let Left::Unsaved { .. } = left {
            return ExitCode::from(NOT_SAVED_EXIT_CODE);
        }
        match self.signal() {
            Some((_, number)) => ExitCode::from(128 + number),
            // The clock of another rank may have been the first.
            None if self.max_secs.is_some() => ExitCode::SUCCESS,
            None => ExitCode::from(128 + 15),
        }
    }
}
