//! What a run goes on from.

use candle_comm::ProcessGroup;
use candle_core::Result;
use candle_parallel::checkpoint::TrainingCheckpoint;
use candle_trainer::{Activity, TrainConfig, TrainingRecord};

use crate::args::lora::LoraArgs;
use crate::training_run::TrainingRun;

/// What a run goes on from.
pub(crate) struct Resumed {
    pub checkpoint: TrainingCheckpoint,
    /// What the run that wrote it has noted.
    pub record: TrainingRecord,
}

impl TrainingRun<'_> {
    /// What the run goes on from, if it does, and if its data and settings allow it. One that is not `to_be_done` changes nothing. Every
    /// rank must call it.
    pub(crate) fn resumed(
        &self,
        record: &TrainingRecord,
        is_restart: bool,
        to_be_done: bool,
        world: &ProcessGroup,
    ) -> Result<Option<Resumed>> {
        let args = &self.spec.training.checkpoints;
        let is_first = world.rank() == 0;
        let is_asked = is_restart || args.resume.is_some();
        let reading = (is_first && is_asked).then(|| Activity::start("reading the checkpoint"));
        let opened = args.open(world, is_restart, to_be_done, &self.observers)?;
        drop(reading);
        let Some(checkpoint) = opened else {
            if is_first && is_asked {
                let place = args.save_dir.as_ref().map(|dir| dir.display());
                let where_not = place.map_or("as there is no --save-dir".into(), |dir| {
                    format!("in {dir}")
                });
                self.observers
                    .note(format!("no checkpoint {where_not}: the run begins"));
            }
            return Ok(None);
        };
        let mut earlier = TrainingRecord::of(&checkpoint)?;
        LoraArgs::rewrite_targets(&mut earlier);
        let changed = record.check(&earlier, args.resume_anyway || is_restart)?;
        for change in changed.iter().filter(|_| is_first) {
            self.observers.warn(change);
        }
        if is_first {
            let (dir, step) = (checkpoint.dir().display(), checkpoint.step());
            if earlier.repeats_gradients {
                self.observers.warn(format!(
                    "{dir} has gradients of asynchronous workers of steps after {step}, which come again: the run does not go on \
                     exactly as it was"
                ));
            }
            let other_sums = record.other_sums(&earlier);
            if !other_sums.is_empty() {
                self.observers.warn(format!(
                    "{}: the same numbers are added in another order, so that the last bits of the weights will differ",
                    other_sums.join("; ")
                ));
            }
            self.observers
                .note(format!("resumed after step {step} from {dir}"));
        }
        Ok(Some(Resumed {
            checkpoint,
            record: earlier,
        }))
    }

    /// Steps of the whole run when it goes on: those of before may have been of other sizes.
    pub(crate) fn num_steps(&self, train: &TrainConfig, resumed: &Resumed) -> Result<usize> {
        let batches = &self.spec.training.batches;
        if batches.steps.is_some() {
            return Ok(train.lr_schedule.num_steps);
        }
        let step = resumed.checkpoint.step();
        let rest = self.spec.training.training_batches(&self.data.samples, 0)?;
        let rest = rest.continued(step, resumed.record.position.total);
        rest.first_step_from(batches.end_of_epochs(rest.num_samples()))
    }
}
