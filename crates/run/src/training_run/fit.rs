//! The steps of a run, with what is shown and written of them.

use candle_comm::Mesh;
use candle_core::Result;
use candle_trainer::{Batches, DataPosition, TrainEvent, Trainer, peaks_in_words};

use crate::output::observer::RunEvent;
use crate::training_run::TrainingRun;
use crate::training_run::best_weights::tell_if_early;

impl TrainingRun<'_> {
    /// Trains the run of this name; what happens the first rank tells. What it trained on.
    pub(crate) fn fit(
        &self,
        trainer: &mut Trainer,
        mesh: &Mesh,
        run: &str,
        position: Option<DataPosition>,
    ) -> Result<Batches> {
        // A server sees no data, and tells by the first worker's how far it is.
        let replica = match self.spec.training.strategy.num_servers() {
            0 => mesh.dp.rank(),
            _ => 0,
        };
        let mut batches = (self.spec.training).training_batches(&self.data.samples, replica)?;
        if let Some(position) = &position {
            batches = batches.continued(trainer.step(), position.total);
        }
        let is_first = mesh.world.rank() == 0;
        let observers = &self.observers;
        let tell = |event: RunEvent| {
            if is_first {
                observers.tell(&event);
            }
        };
        let num_steps = trainer.num_steps();
        tell(RunEvent::Begin { num_steps });
        let trace = &self.spec.training.logs.trace;
        let mut tracer = trace.tracer(mesh, run, trainer.step(), observers);
        let trained = trainer.train_observed(&batches, |event| {
            if let (Some(tracer), TrainEvent::Step(step)) = (&mut tracer, event)
                && let Some(traced) = tracer.after_step(step.step)?
            {
                tell(RunEvent::Note(&traced));
            }
            if let (true, TrainEvent::Step(step)) = (is_first, event) {
                self.stop.note(step.global_step);
            }
            tell(RunEvent::Train(event));
            Ok(())
        });
        // Otherwise a rank is gone, and nobody can ask the others what they did.
        let is_together = trained.is_ok() || trainer.has_diverged();
        let traced = match tracer.filter(|_| is_together) {
            Some(mut tracer) => tracer.finish(),
            None => Ok(None),
        };
        if let Ok(Some(traced)) = &traced {
            tell(RunEvent::Note(traced));
        }
        trained.and(traced)?;
        tell(RunEvent::End);
        if is_first {
            tell_if_early(trainer, observers);
        }
        mesh.world.set_step(trainer.step(), "after training");
        let memory = trainer.memory_of_largest_rank(trainer.memory())?;
        if is_first {
            let memory = peaks_in_words(&memory);
            observers.note(format!("memory of the largest rank: {memory}"));
        }
        Ok(batches)
    }
}
