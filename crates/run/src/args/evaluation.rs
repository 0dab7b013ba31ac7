//! Flags about evaluation.

use std::ops::Bound::Excluded;

use candle_core::{Result, bail};
use candle_trainer::{DataSpec, EvalBatches, EvalHistory, Evaluation};
use clap::Args;
use serde::Serialize;

use crate::args::number::{real, whole};
use crate::args::text::texts;

/// Loss, perplexity and accuracy on samples that are not trained on.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct EvalArgs {
    /// Evaluate on these files, which are read as those of --data; of hub://datasets/.. come the files of the split validation, else of test [default: no evaluation]
    #[arg(long, num_args = 1.., value_name = "PATH[:WEIGHT]", conflicts_with = "eval_fraction")]
    #[serde(serialize_with = "texts")]
    pub eval_data: Vec<DataSpec>,
    /// Evaluate on this part of the records of --data, of a text of its sequences, chosen by --seed, and train on the others [default: no evaluation]
    #[arg(long, value_name = "FRACTION", value_parser = real((Excluded(0.0), Excluded(1.0))))]
    pub eval_fraction: Option<f64>,
    /// Evaluate after every so many steps, too [default: after the last step only]
    #[arg(long, value_name = "STEPS", value_parser = whole::<usize>(1..))]
    pub eval_every: Option<usize>,
    /// End training when so many evaluations in a row bring no smaller loss than the best before; --output then gets the weights with the
    /// least loss, also of a run that ends with its last step. They are kept in --save-dir, or without it beside --output until the end, in a folder that on several hosts all of them must have
    /// [default: never]
    #[arg(long, value_name = "EVALUATIONS", value_parser = whole::<usize>(1..))]
    pub patience: Option<usize>,
}

impl EvalArgs {
    /// Whether there are evaluations.
    pub fn has_data(&self) -> bool {
        !self.eval_data.is_empty() || self.eval_fraction.is_some()
    }

    /// An error if one of these flags is given without that which it needs.
    pub(crate) fn validate(&self) -> Result<()> {
        for (flag, is_given) in [
            ("--eval-every", self.eval_every.is_some()),
            ("--patience", self.patience.is_some()),
        ] {
            if is_given && !self.has_data() {
                bail!(
                    "{flag} is given without samples to evaluate on\nhint: --eval-data names them, or --eval-fraction holds out some of --data"
                );
            }
        }
        if let (Some(_), None) = (self.patience, self.eval_every) {
            bail!(
                "--patience is given without --eval-every, which tells how often the model is evaluated"
            );
        }
        Ok(())
    }

    /// An evaluation of `batches`, when these flags ask for it.
    pub fn evaluation(&self, batches: EvalBatches, history: EvalHistory) -> Evaluation {
        Evaluation::new(move || batches.iter())
            .with_every(self.eval_every)
            .with_patience(self.patience)
            .with_history(history)
    }
}
