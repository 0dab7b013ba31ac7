//! How good a model is on samples that it is not trained on, between the steps of its training.

use candle_core::Result;
use candle_parallel::Pass;
use serde::{Deserialize, Serialize};

/// Numbers of an evaluation, over all ranks. A line of its own in the metrics file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalMetrics {
    /// The last step before it, counted from 0.
    pub step: usize,
    /// Steps of the run that were done before it: the number by which people are told of it, and of a checkpoint after it.
    #[serde(default)]
    pub global_step: usize,
    /// Passes over the data that were done before it, with their fraction; `None` of an evaluation outside of a run over batches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<f64>,
    /// Cross-entropy in nats, averaged over all targets. It may be NaN or infinite; JSON has null for both.
    #[serde(deserialize_with = "crate::logs::step_metrics::number_or_null")]
    pub eval_loss: f64,
    /// Its exponential.
    #[serde(deserialize_with = "crate::logs::step_metrics::number_or_null")]
    pub eval_perplexity: f64,
    /// Part of the targets to which the model gives the largest logit; `None` if its last block does not tell.
    pub eval_accuracy: Option<f64>,
    /// Number of targets.
    pub eval_num_tokens: usize,
    /// Wall-clock time, in seconds.
    pub eval_secs: f64,
}

impl EvalMetrics {
    /// For people.
    pub fn in_words(&self) -> String {
        let Self {
            global_step,
            eval_loss,
            eval_perplexity,
            ..
        } = self;
        let accuracy = self.eval_accuracy.map_or(String::new(), |accuracy| {
            format!(", accuracy {:.1}%", 100.0 * accuracy)
        });
        format!(
            "evaluation after step {global_step}: loss {eval_loss:.4}, perplexity {eval_perplexity:.2}{accuracy}"
        )
    }
}

/// When a trainer evaluates, and on what: see [`Trainer::with_evaluation`](crate::Trainer::with_evaluation).
pub struct Evaluation {
    pub(crate) batches: BatchesOfEvaluation,
    pub(crate) every: Option<usize>,
    pub(crate) patience: Option<usize>,
    pub(crate) history: EvalHistory,
}

type BatchesOfEvaluation = Box<dyn Fn() -> Box<dyn Iterator<Item = Result<Pass>>> + Send>;

/// What the evaluations of a run gave so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvalHistory {
    /// The least loss, and the steps that were done then.
    pub best: Option<(f64, usize)>,
    /// Evaluations since then.
    pub num_without_improvement: usize,
}

impl Evaluation {
    /// After the last step, on what `batches` gives each time: this rank's share of the samples, in as many micro-batches as
    /// every replica has, such as [`EvalBatches::iter`](crate::EvalBatches::iter) does.
    pub fn new<I: Iterator<Item = Result<Pass>> + 'static>(
        batches: impl Fn() -> I + Send + 'static,
    ) -> Self {
        Self {
            batches: Box::new(move || Box::new(batches())),
            every: None,
            patience: None,
            history: EvalHistory::default(),
        }
    }

    /// Steps between evaluations, too.
    pub fn with_every(self, every: Option<usize>) -> Self {
        Self { every, ..self }
    }

    /// Evaluations in a row that may bring no smaller loss than the best before; then training ends.
    pub fn with_patience(self, patience: Option<usize>) -> Self {
        Self { patience, ..self }
    }

    /// What earlier evaluations gave.
    pub fn with_history(self, history: EvalHistory) -> Self {
        Self { history, ..self }
    }

    /// Whether there is one after `step` steps of `num_steps`.
    pub(crate) fn is_due(&self, step: usize, num_steps: usize) -> bool {
        step == num_steps || self.every.is_some_and(|every| step.is_multiple_of(every))
    }

    /// Whether training ends before its last step.
    pub(crate) fn is_out_of_patience(&self) -> bool {
        let patience = self.patience;
        patience.is_some_and(|patience| self.history.num_without_improvement >= patience)
    }
}

impl EvalHistory {
    /// Notes a loss after `step` steps.
    pub(crate) fn add(&mut self, loss: f64, step: usize) {
        let is_better = self.best.is_none_or(|(best, _)| loss < best);
        if is_better && loss.is_finite() {
            self.best = Some((loss, step));
            self.num_without_improvement = 0;
        } else {
            self.num_without_improvement += 1;
        }
    }
}
