//! Evaluation between steps.

use std::time::Instant;

use candle_comm::trace::{self, SpanKind};
use candle_core::Result;

use super::Trainer;
use crate::evaluation::EvalMetrics;

impl Trainer {
    /// Evaluates the model as it is: loss, perplexity and accuracy over all samples of the [evaluation](Self::with_evaluation), each of them once;
    /// `None` without one. Nothing of the training changes. Every rank must call it, between steps.
    ///
    /// # Errors
    /// Failures of ranks and devices.
    pub fn evaluate(&mut self) -> Result<Option<EvalMetrics>> {
        let device = self.world.device().clone();
        trace::record(SpanKind::Evaluation, &device, || self.run_evaluation())
    }

    fn run_evaluation(&mut self) -> Result<Option<EvalMetrics>> {
        let Some(evaluation) = &mut self.evaluation else {
            return Ok(None);
        };
        let start = Instant::now();
        self.world.set_step(self.step, "evaluation");
        let batches = (evaluation.batches)();
        let own = self.pipeline.evaluate(&self.part, batches)?;
        let all = own.of_all(&self.mesh)?;
        let num_targets = all.num_targets;
        let loss = all.loss() / num_targets;
        evaluation.history.add(loss, self.step);
        if let Some(checkpoints) = &mut self.checkpoints {
            checkpoints.note_evaluation(self.step, loss, evaluation.history);
        }
        Ok(Some(EvalMetrics {
            step: self.step.saturating_sub(1),
            global_step: self.step,
            epoch: None,
            eval_loss: loss,
            eval_perplexity: loss.exp(),
            eval_accuracy: all.num_right.map(|right| right / num_targets),
            eval_num_tokens: all.num_targets as usize,
            eval_secs: start.elapsed().as_secs_f64(),
        }))
    }
}
