//! The best weights of a run with `--patience`: where they are kept, and how they become its result.

use std::path::{Path, PathBuf};

use candle_comm::{Mesh, message_of};
use candle_core::{Error, Result};
use candle_parallel::checkpoint::TrainingCheckpoint;
use candle_trainer::{Activity, EvalHistory, Trainer, TrainingRecord, counted};

use crate::args::checkpoints::place_of_best;
use crate::args::training::TrainingArgs;
use crate::output::observer::Observers;

impl TrainingArgs {
    /// The folder in which the run keeps its best weights until its end, if it needs them and has no folder of checkpoints.
    ///
    /// # Errors
    /// The working directory cannot be read.
    pub(crate) fn folder_of_best(&self) -> Result<Option<PathBuf>> {
        let is_needed = self.evaluation.patience.is_some() && self.checkpoints.save_dir.is_none();
        is_needed
            .then(|| place_of_best(&self.output.output))
            .transpose()
    }
}

/// Removes the best weights of a run into `output`: those of one that was killed, or that has ended well.
///
/// # Errors
/// They are there and cannot be removed.
pub(crate) fn remove_best(output: &Path) -> Result<()> {
    let folder = place_of_best(output)?;
    match std::fs::remove_dir_all(&folder) {
        Err(err) if err.kind() != std::io::ErrorKind::NotFound => Err(Error::msg(format!(
            "cannot remove {}: {err}",
            folder.display()
        ))),
        _ => Ok(()),
    }
}

/// Gives a model that was trained to the end the weights of the evaluation with the least loss, from the checkpoint of it in one of
/// `folders`. If there is none, a warning says so and the weights stay. Every rank must call it.
///
/// # Errors
/// Failures of ranks and devices.
pub(crate) fn take_best(
    trainer: &mut Trainer,
    mesh: &Mesh,
    folders: &[&Path],
    observers: &Observers,
) -> Result<()> {
    let best = trainer.evaluations().and_then(|history| history.best);
    let Some((loss, step)) = best.filter(|(_, step)| *step != trainer.step()) else {
        return Ok(());
    };
    let (is_first, last) = (mesh.world.rank() == 0, trainer.step());
    let _reading = is_first.then(|| Activity::start("reading the best weights"));
    let mut why_not = String::new();
    for folder in folders {
        match TrainingCheckpoint::open(&mesh.world, &TrainingCheckpoint::path(folder, step)) {
            Ok(checkpoint)
                if TrainingRecord::of(&checkpoint)?.evaluation.best != Some((loss, step)) =>
            {
                why_not = format!("{} is of another run", checkpoint.dir().display());
            }
            Ok(checkpoint) => {
                trainer.resume(&checkpoint).map_err(|err| {
                    Error::msg(format!(
                        "{}\nhint: candle-train export writes what {} has as a model",
                        message_of(&err),
                        checkpoint.dir().display()
                    ))
                })?;
                if is_first {
                    observers.note(format!(
                        "the weights after step {step}, with the least evaluation loss, {loss:.4}, are what is saved"
                    ));
                }
                return Ok(());
            }
            Err(err) => why_not = message_of(&err),
        }
    }
    if is_first {
        observers.warn(format!(
            "the weights after step {last} are what is saved, as those with the least evaluation loss, after step {step}, are lost: {why_not}"
        ));
    }
    Ok(())
}

/// Says where the best weights are of a run that was stopped and has no other checkpoints, if it has any; for the first rank.
pub(crate) fn tell_of_best(trainer: &Trainer, folder: &Path, observers: &Observers) {
    let best = trainer.evaluations().and_then(|history| history.best);
    if let Some((loss, step)) = best {
        observers.note(format!(
            "the weights with the least evaluation loss, {loss:.4}, are in {} until the next run; candle-train export writes them as a model",
            TrainingCheckpoint::path(folder, step).display()
        ));
    }
}

/// Says that evaluations have ended the training, if they have; for the first rank.
pub(crate) fn tell_if_early(trainer: &Trainer, observers: &Observers) {
    if !trainer.is_stopped_early() {
        return;
    }
    let EvalHistory {
        best,
        num_without_improvement,
    } = trainer.evaluations().unwrap_or_default();
    let best =
        best.map(|(loss, step)| format!("; the least loss, {loss:.4}, was that after step {step}"));
    let (step, num_steps) = (trainer.step(), trainer.num_steps());
    observers.note(format!(
        "stopped after step {step} of {num_steps}: {} without improvement{}",
        counted(num_without_improvement, "evaluation"),
        best.unwrap_or_default()
    ));
}
