//! The steps of a run, with what is shown and written of them.

use candle_comm::Mesh;
use candle_core::Result;
use candle_train::{
    Batches, DataPosition, MetricsLine, Progress, TrainEvent, Trainer, peaks_in_words,
};

use crate::args::logs::StepLogs;
use crate::best_weights::tell_if_early;
use crate::output::print_line;
use crate::training_run::TrainingRun;

impl TrainingRun {
    /// Trains; the rank that has `logs`, the first one, shows progress and writes metrics. What it trained on.
    pub(crate) fn fit(
        &self,
        trainer: &mut Trainer,
        mesh: &Mesh,
        logs: Option<StepLogs>,
        position: Option<DataPosition>,
    ) -> Result<Batches> {
        // A server sees no data, and tells by the first worker's how far it is.
        let replica = match self.training.strategy.num_servers() {
            0 => mesh.dp.rank(),
            _ => 0,
        };
        let mut batches = (self.training).training_batches(&self.data.samples, replica)?;
        if let Some(position) = &position {
            batches = batches.continued(trainer.step(), position.total);
        }
        let is_first = mesh.world.rank() == 0;
        let mut shown = logs.map(|logs| (Progress::new(trainer.num_steps()), logs));
        let mut tracer = self.training.logs.trace.tracer(mesh, trainer.step());
        let trained = trainer.train_observed(&batches, |event| {
            let traced = match (&mut tracer, event) {
                (Some(tracer), TrainEvent::Step(step)) => tracer.after_step(step.step)?,
                _ => None,
            };
            if let Some((progress, logs)) = &mut shown {
                if let Some(traced) = traced {
                    progress.println(&traced);
                }
                let line: Option<MetricsLine> = match event {
                    TrainEvent::Step(step) => {
                        self.stop.note(step.global_step);
                        progress.update(step);
                        Some(step.into())
                    }
                    TrainEvent::Begin(what) => {
                        progress.between_steps(what);
                        None
                    }
                    TrainEvent::Evaluation(evaluation) => {
                        progress.println(&evaluation.in_words());
                        Some(evaluation.into())
                    }
                    _ => None,
                };
                if let Some(line) = line {
                    logs.log(&line, |warning| progress.println(warning));
                }
            }
            Ok(())
        });
        // Otherwise a rank is gone, and nobody can ask the others what they did.
        let is_together = trained.is_ok() || trainer.has_diverged();
        let traced = match tracer.filter(|_| is_together) {
            Some(mut tracer) => tracer.finish(),
            None => Ok(None),
        };
        if let (Ok(Some(traced)), Some((progress, _))) = (&traced, &mut shown) {
            progress.println(traced);
        }
        trained.and(traced)?;
        if let Some((progress, _)) = &mut shown {
            progress.finish();
        }
        if is_first {
            tell_if_early(trainer);
        }
        mesh.world.set_step(trainer.step(), "after training");
        let memory = trainer.memory_of_largest_rank(trainer.memory())?;
        if is_first {
            let memory = peaks_in_words(&memory);
            print_line(&format!("memory of the largest rank: {memory}"));
        }
        Ok(batches)
    }
}
