//! Flags about evaluation.

use std::path::PathBuf;
use std::sync::Arc;

use candle_core::{Device, Result, bail};
use candle_train::{Batches, Documents, EvalBatches, Tokenizer, Tokens, held_out};
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

/// What a run is evaluated on.
pub(crate) enum EvalData {
    Nothing,
    /// Other data.
    Tokens(Tokens),
    /// Numbers of samples of the data that is trained on.
    HeldOut(Arc<[usize]>),
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

    /// What of `tokens`, or of the tokens of `--eval-data`, is not trained on.
    pub fn data(
        &self,
        tokens: &Tokens,
        of_eval_data: Option<&Tokens>,
        batches: &BatchArgs,
    ) -> Result<EvalData> {
        if let Some(tokens) = of_eval_data {
            return Ok(EvalData::Tokens(tokens.clone()));
        }
        let Some(fraction) = self.eval_fraction else {
            return Ok(EvalData::Nothing);
        };
        let num_samples = tokens.samples(batches.seq_len)?.len();
        let [_, chosen] = held_out(num_samples, fraction, batches.seed)?;
        Ok(EvalData::HeldOut(chosen))
    }
}
