//! What a run leaves at its end, and how far that is.

use std::path::Path;

use candle_core::Result;
use candle_parallel::checkpoint::HfSave;
use candle_trainer::{Activity, Batches, DataPosition, Trainer};

use crate::output::in_words;
use crate::output::observer::{Observers, RunEvent};
use crate::training_run::stop::{Left, Stopped, newest_checkpoint};

/// Leaves what a run that was stopped can be gone on with: a checkpoint, with the place in its `batches`, or without those the model. Every
/// rank must call it.
pub(crate) fn leave(
    trainer: &mut Trainer,
    (batches, save_dir): (Option<&Batches>, Option<&Path>),
    save: &HfSave,
    is_first: bool,
    observers: &Observers,
) -> Result<Stopped> {
    let step = trainer.step();
    let saving = is_first.then(|| Activity::start("saving a checkpoint"));
    let outcome = match batches {
        Some(batches) => trainer.save_checkpoint(DataPosition::of(batches, step)?)?,
        None => None,
    };
    drop(saving);
    let save = HfSave {
        steps: Some(step),
        ..save.clone()
    };
    let left = match outcome.map(|outcome| outcome.saved) {
        Some(Ok(path)) => Left::Checkpoint(path),
        None => {
            save_model(trainer, &save, is_first)?;
            Left::Model
        }
        // Why has been told.
        Some(Err(_)) => {
            let model = save_model(trainer, &save, is_first);
            if let (Err(error), true) = (&model, is_first) {
                observers.tell(&RunEvent::Failure(&in_words(error)));
            }
            Left::Unsaved {
                has_model: model.is_ok(),
                resumable: save_dir.and_then(newest_checkpoint),
            }
        }
    };
    Ok(Stopped {
        step,
        left,
        output_flag: "--model",
    })
}

/// Saves the model. Every rank must call it.
pub(crate) fn save_model(trainer: &Trainer, save: &HfSave, is_first: bool) -> Result<()> {
    let _saving = is_first.then(|| {
        let total = save.num_bytes(trainer.part().params()).ok();
        Activity::of_bytes("saving the model", total, save.num_written_bytes.clone())
    });
    trainer.save_hf(save)
}
