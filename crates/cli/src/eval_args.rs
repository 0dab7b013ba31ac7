//! Flags about evaluation.

use std::ops::Bound::Excluded;
use std::path::PathBuf;
use std::sync::Arc;

use candle_core::{Result, bail};
use candle_train::{Documents, EvalBatches, EvalHistory, Evaluation, Tokenizer, Tokens, held_out};
use clap::Args;

use crate::number::{real, whole};
use crate::training_args::BatchArgs;

/// Loss, perplexity and accuracy on samples that are not trained on.
#[derive(Args, Clone, Debug)]
pub(crate) struct EvalArgs {
    /// Evaluate on this text file, or on a folder of them, as --data is read [default: no evaluation]
    #[arg(long, value_name = "FILE|DIR", conflicts_with = "eval_fraction")]
    pub eval_data: Option<PathBuf>,
    /// Evaluate on this part of the samples of --data, chosen by --seed, and train on the others [default: no evaluation]
    #[arg(long, value_name = "FRACTION", value_parser = real((Excluded(0.0), Excluded(1.0))))]
    pub eval_fraction: Option<f64>,
    /// Evaluate after every so many steps, too [default: after the last step only]
    #[arg(long, value_name = "STEPS", value_parser = whole::<usize>(1..))]
    pub eval_every: Option<usize>,
    /// End training when so many evaluations in a row bring no smaller loss than the best before [default: never]
    #[arg(long, value_name = "EVALUATIONS", value_parser = whole::<usize>(1..))]
    pub patience: Option<usize>,
}

impl EvalArgs {
    /// An error if these flags contradict each other, or `save_every`.
    pub fn validate(&self, save_every: Option<usize>) -> Result<()> {
        let has_data = self.eval_data.is_some() || self.eval_fraction.is_some();
        for (flag, is_given) in [
            ("--eval-every", self.eval_every.is_some()),
            ("--patience", self.patience.is_some()),
        ] {
            if is_given && !has_data {
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
        if let (Some(eval), Some(save)) = (self.eval_every, save_every)
            && !eval.is_multiple_of(save)
            && !save.is_multiple_of(eval)
        {
            bail!(
                "--eval-every {eval} and --save-every {save}: few checkpoints would have an evaluation loss, and the best could not be \
                 kept\nhint: make one a multiple of the other"
            );
        }
        Ok(())
    }

    /// The tokens of `--eval-data`, if it is given.
    pub fn tokens(&self, tokenizer: &Tokenizer) -> Result<Option<Tokens>> {
        let Some(path) = &self.eval_data else {
            return Ok(None);
        };
        Tokens::encode(&Documents::read(path)?, tokenizer).map(Some)
    }

    /// Numbers of the samples that are trained on, and of those held out, if some are.
    pub fn held_out(
        &self,
        tokens: &Tokens,
        batches: &BatchArgs,
    ) -> Result<Option<[Arc<[usize]>; 2]>> {
        let Some(fraction) = self.eval_fraction else {
            return Ok(None);
        };
        let num_samples = tokens.samples(batches.seq_len)?.len();
        held_out(num_samples, fraction, batches.seed).map(Some)
    }

    /// What replica `dp_rank` of `dp` evaluates, if there is something: samples of `of_eval_data`, the tokens of `--eval-data`, or of
    /// `tokens`, which are trained on.
    pub fn evaluation(
        &self,
        (tokens, of_eval_data): (&Tokens, Option<&Tokens>),
        batches: &BatchArgs,
        (dp_rank, dp): (usize, usize),
        history: EvalHistory,
    ) -> Result<Option<Evaluation>> {
        let chosen = self.held_out(tokens, batches)?.map(|[_, chosen]| chosen);
        let tokens = match (of_eval_data, &chosen) {
            (Some(tokens), _) => tokens,
            (None, Some(_)) => tokens,
            (None, None) => return Ok(None),
        };
        let sizes = (batches.seq_len, batches.micro_batch_size);
        Ok(Some(Evaluation {
            batches: EvalBatches::new(tokens, chosen, sizes, (dp_rank, dp))?,
            every: self.eval_every,
            patience: self.patience,
            history,
        }))
    }
}
