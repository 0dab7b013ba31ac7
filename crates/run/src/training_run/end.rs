//! How training ended: what it says, and the exit code.

use std::path::Path;
use std::process::ExitCode;

use candle_core::Error;
use candle_launch::{NOT_SAVED_EXIT_CODE, RankEnv, WOULD_FAIL_AGAIN_EXIT_CODE};
use candle_trainer::counted;

use crate::output::observer::{Observers, RunEvent};
use crate::output::{code_of_refusal, in_words};
use crate::training_run::stop::{Left, Stop, Stopped};

/// How a rank's part ended, the same on every rank.
pub(crate) enum End {
    Complete,
    /// The model is saved, and none of so many checkpoints.
    WithoutCheckpoints(usize),
    /// The model is saved, and not as a GGUF file.
    WithoutGguf(Error),
    Stopped(Stopped),
    /// All ranks found, before the first step, that they cannot go on from the checkpoint or write new ones.
    Refused(Error),
    /// Numbers that are no numbers any more, and would be none again if the same steps were done again.
    Diverged(Error),
}

impl End {
    /// Says how a run of `num_steps` ended, whose model is in `output`; a process that `is_alone` has all ranks. One rank need call it.
    pub(crate) fn tell(
        &self,
        stop: &Stop,
        num_steps: usize,
        (output, is_alone): (&Path, bool),
        observers: &Observers,
    ) {
        let fail = |failure: &str| observers.tell(&RunEvent::Failure(failure));
        match self {
            // Of the file it is told where that is written.
            Self::Complete | Self::WithoutGguf(_) => {
                observers.note(format!("saved to {}", output.display()));
            }
            Self::WithoutCheckpoints(number) => {
                observers.note(format!("saved to {}", output.display()));
                fail(&format!(
                    "the model is saved, but not one of {} could be: see the warnings above",
                    counted(*number, "checkpoint")
                ));
            }
            Self::Stopped(stopped) => {
                let how = stop.describe(stopped, num_steps, (output, is_alone));
                let saved = match &stopped.left {
                    Left::Checkpoint(checkpoint) => Some(checkpoint.as_path()),
                    Left::Model => Some(output),
                    Left::Unsaved { has_model, .. } => has_model.then_some(output),
                };
                if let Some(saved) = saved {
                    observers.note(format!("saved to {}", saved.display()));
                }
                match stopped.left {
                    Left::Unsaved { .. } => fail(&how),
                    _ => observers.note(&how),
                }
            }
            Self::Refused(err) | Self::Diverged(err) => fail(&in_words(err)),
        }
    }

    /// The code with which each process of the run exits.
    pub(crate) fn exit_code(&self, stop: &Stop, env: &RankEnv) -> ExitCode {
        match self {
            Self::Complete => ExitCode::SUCCESS,
            Self::WithoutCheckpoints(_) | Self::WithoutGguf(_) => {
                ExitCode::from(NOT_SAVED_EXIT_CODE)
            }
            Self::Stopped(stopped) => stop.exit_code(&stopped.left),
            Self::Refused(_) => ExitCode::from(code_of_refusal(env)),
            Self::Diverged(_) => ExitCode::from(WOULD_FAIL_AGAIN_EXIT_CODE),
        }
    }
}
