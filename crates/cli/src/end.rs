//! How training ended: what it says, and the exit code.

use std::path::Path;
use std::process::ExitCode;

use candle_core::Error;
use candle_launch::{RankEnv, WOULD_FAIL_AGAIN_EXIT_CODE};

use crate::output::{exit_code_of_refusal, print_error, print_line};
use crate::stop::{Stop, Stopped};

/// How a rank's part ended, the same on every rank.
pub(crate) enum End {
    Complete,
    Stopped(Stopped),
    /// All ranks found, before the first step, that they cannot go on from the checkpoint or write new ones.
    Refused(Error),
    /// Numbers that are no numbers any more, and would be none again if the same steps were done again.
    Diverged(Error),
}

impl End {
    /// Says how a run of `num_steps` ended, whose model is in `output`; a process that `is_alone` has all ranks. One rank need call it.
    pub(crate) fn tell(&self, stop: &Stop, num_steps: usize, (output, is_alone): (&Path, bool)) {
        match self {
            Self::Complete => print_line(&format!("saved to {}", output.display())),
            Self::Stopped(stopped) => {
                let saved = stopped.checkpoint.as_deref().unwrap_or(output);
                print_line(&format!("saved to {}", saved.display()));
                print_line(&stop.describe(stopped, num_steps, (output, is_alone)));
            }
            Self::Refused(err) | Self::Diverged(err) => print_error(err),
        }
    }

    /// The code with which each process of the run exits.
    pub(crate) fn exit_code(&self, stop: &Stop, env: &RankEnv) -> ExitCode {
        match self {
            Self::Complete => ExitCode::SUCCESS,
            Self::Stopped(_) => stop.exit_code(),
            Self::Refused(_) => exit_code_of_refusal(env),
            Self::Diverged(_) => ExitCode::from(WOULD_FAIL_AGAIN_EXIT_CODE),
        }
    }
}
