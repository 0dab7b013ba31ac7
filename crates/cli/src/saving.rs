//! What a run leaves at its end, and how far that is.

use std::sync::atomic::Ordering;

use candle_core::Result;
use candle_parallel::checkpoint::{HfSave, SaveOutcome};
use candle_train::{Activity, Batches, Trainer};

use crate::stop::Stopped;

/// Leaves what a run that was stopped can be gone on with: a checkpoint, with the place in its `batches`, or without those the model. Every
/// rank must call it.
pub(crate) fn leave(
    trainer: &mut Trainer,
    batches: Option<&Batches>,
    save: &HfSave,
    is_first: bool,
) -> Result<Stopped> {
    let step = trainer.step();
    let saving = is_first.then(|| Activity::start("saving a checkpoint"));
    let outcome = match batches {
        Some(batches) => trainer.save_checkpoint(batches)?,
        None => None,
    };
    drop(saving);
    let checkpoint = match outcome {
        Some(SaveOutcome {
            saved: Ok(path), ..
        }) => Some(path),
        // Why has been told.
        Some(_) | None => {
            let save = HfSave {
                steps: Some(step),
                ..save.clone()
            };
            save_model(trainer, &save, is_first)?;
            None
        }
    };
    Ok(Stopped {
        step,
        checkpoint,
        output_flag: "--model",
    })
}

/// Saves the model. Every rank must call it.
pub(crate) fn save_model(trainer: &Trainer, save: &HfSave, is_first: bool) -> Result<()> {
    let _saving = is_first.then(|| {
        let total = save.num_bytes(trainer.stage().params()).ok();
        let written = save.num_written_bytes.clone();
        let done = move || written.load(Ordering::Relaxed);
        Activity::of_bytes("saving the model", total, done)
    });
    trainer.save_hf(save)
}
