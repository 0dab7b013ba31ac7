//! When a trainer saves, and what becomes of it.

use candle_comm::message_of;
use candle_core::{Error, Result};
use candle_data::DataPosition;
use candle_parallel::DistributedOptimizer;
use candle_parallel::checkpoint::{CheckpointNote, CheckpointSaver, SaveOutcome, SetAside};

use crate::evaluation::EvalHistory;
use crate::loss_range::LossHistory;
use crate::training_record::TrainingRecord;

/// A trainer's checkpoints: see [`Trainer::with_checkpoints`](crate::Trainer::with_checkpoints).
///
/// The step after which a checkpoint is due waits for a copy of the values only, or where these are offloaded until they are written; later steps
/// look whether all is. A save that
/// fails is a warning on rank 0, and training goes on. Older checkpoints are removed when the next step's loss has shown that the weights of
/// a new one are of use.
pub struct Checkpoints {
    saver: CheckpointSaver,
    /// Steps between checkpoints.
    pub(crate) every: Option<usize>,
    record: TrainingRecord,
    is_first: bool,
    /// No step comes after it.
    is_ending: bool,
    /// The newest evaluation's steps and loss.
    evaluated: Option<(usize, f64)>,
    /// How the newest save that ended did, and how many succeeded and failed.
    last: Option<SaveOutcome>,
    /// Steps of the newest checkpoint, if there may be older ones to be removed.
    outdates: Option<usize>,
    num_saved: usize,
    num_failed: usize,
}

/// What is saved: a run after so many steps.
pub(crate) struct RunState<'a> {
    pub optimizer: &'a DistributedOptimizer,
    pub step: usize,
    /// Its place in the data.
    pub position: DataPosition,
    pub losses: &'a LossHistory,
    /// As in the [`TrainingRecord`].
    pub repeats_gradients: bool,
}

impl Checkpoints {
    /// A checkpoint after every `every` steps, if it is given, and after each evaluation with a smaller loss than all before; with `record` and
    /// the place in the data. Only the rank that `is_first` tells about them.
    pub fn new(
        saver: CheckpointSaver,
        every: Option<usize>,
        record: TrainingRecord,
        is_first: bool,
    ) -> Self {
        // One that a start before left at its end is judged by the first step of this one.
        let outdates = saver.resumed_step();
        Self {
            saver: saver.removing_on_request(),
            every,
            record,
            is_first,
            is_ending: false,
            evaluated: None,
            last: None,
            outdates,
            num_saved: 0,
            num_failed: 0,
        }
    }

    /// Notes an evaluation: a checkpoint after these steps remembers its loss, and later ones what came of all.
    pub(crate) fn note_evaluation(&mut self, step: usize, loss: f64, history: EvalHistory) {
        self.evaluated = Some((step, loss));
        self.record.evaluation = history;
    }

    /// How many saves failed, if all did.
    pub(crate) fn num_failed_of_all(&self) -> usize {
        match self.num_saved {
            0 => self.num_failed,
            _ => 0,
        }
    }

    /// Every rank must call it after each step.
    pub(crate) fn after_step(&mut self, run: RunState) -> Result<()> {
        let step = run.step;
        let is_best = self
            .record
            .evaluation
            .best
            .is_some_and(|(_, at)| at == step);
        if is_best || self.every.is_some_and(|every| step.is_multiple_of(every)) {
            return self.start(run);
        }
        let outcome = self.saver.poll()?;
        self.tell(outcome);
        self.remove_old(step, run.losses);
        Ok(())
    }

    /// A checkpoint, written when this returns; how that ended. Older ones stay, as no step shows that it is of use. Every rank must call it.
    pub(crate) fn save_now(&mut self, run: RunState) -> Result<Option<SaveOutcome>> {
        self.save_last(run)?;
        Ok(self.last.clone())
    }

    /// A checkpoint of a run that has failed: it and all after `first` and more steps are set aside. How that ended, and where they are. Every
    /// rank must call it.
    pub(crate) fn save_failed(
        &mut self,
        run: RunState,
        first: usize,
    ) -> Result<(Option<SaveOutcome>, SetAside)> {
        let last = run.step;
        self.save_last(run)?;
        let set_aside = self.saver.set_failed_aside(first..=last)?;
        Ok((self.last.clone(), set_aside))
    }

    /// Has a checkpoint of a run's last step.
    fn save_last(&mut self, run: RunState) -> Result<()> {
        self.is_ending = true;
        self.finish()?;
        let is_there = |last: &SaveOutcome| last.step == run.step && last.saved.is_ok();
        if !self.last.as_ref().is_some_and(is_there) {
            self.start(run)?;
            self.finish()?;
        }
        Ok(())
    }

    /// Waits for a save that is under way when no step comes any more. Every rank must call it.
    pub(crate) fn end(&mut self, losses: &LossHistory) -> Result<()> {
        self.is_ending = true;
        self.finish()?;
        self.remove_older(losses, |_| true);
        Ok(())
    }

    /// Removes the checkpoints that are older than the newest one, if that is of fewer than `step` steps and has shown a loss that is a number.
    fn remove_old(&mut self, step: usize, losses: &LossHistory) {
        self.remove_older(losses, |newest| {
            newest < step && losses.has_loss_since(newest)
        });
    }

    fn remove_older(&mut self, losses: &LossHistory, is_judged: impl Fn(usize) -> bool) {
        if let Some(newest) = self.outdates.filter(|newest| is_judged(*newest)) {
            self.outdates = None;
            if let Err(err) = self.saver.remove_old(newest, losses.left_at()) {
                tracing::warn!("{}", message_of(&err));
            }
        }
    }

    /// Waits for a save that is under way. Every rank must call it.
    pub(crate) fn finish(&mut self) -> Result<()> {
        let outcome = self.saver.finish()?;
        self.tell(outcome);
        Ok(())
    }

    fn start(
        &mut self,
        RunState {
            optimizer,
            step,
            position,
            losses,
            repeats_gradients,
        }: RunState,
    ) -> Result<()> {
        self.finish()?;
        self.remove_old(step, losses);
        if repeats_gradients && self.is_first {
            tracing::warn!(
                "the checkpoint after step {step} has gradients of later steps, which come again: it cannot be resumed exactly"
            );
        }
        let record = TrainingRecord {
            position,
            losses: losses.clone(),
            repeats_gradients,
            ..self.record.clone()
        };
        let record = serde_json::to_value(record).map_err(Error::wrap)?;
        let evaluated = self.evaluated.filter(|(of_step, _)| *of_step == step);
        let eval_loss = evaluated.map(|(_, loss)| loss);
        let note = CheckpointNote {
            record,
            eval_loss: eval_loss.filter(|loss| loss.is_finite()),
        };
        let outcome = self.saver.start(optimizer, step, note)?;
        self.tell(outcome);
        Ok(())
    }

    fn tell(&mut self, outcome: Option<SaveOutcome>) {
        let Some(outcome) = outcome else {
            return;
        };
        match &outcome.saved {
            Ok(_) => {
                self.num_saved += 1;
                self.outdates = Some(outcome.step);
            }
            Err(_) => self.num_failed += 1,
        }
        if self.is_first {
            match &outcome.saved {
                Ok(path) => tracing::debug!("saved {}", path.display()),
                Err(message) => tracing::warn!(
                    "there is no checkpoint after step {}{}: {message}",
                    outcome.step,
                    if self.is_ending {
                        ""
                    } else {
                        ", and training goes on"
                    }
                ),
            }
            if let Some(warning) = &outcome.warning {
                tracing::warn!("{warning}");
            }
        }
        self.last = Some(outcome);
    }
}
