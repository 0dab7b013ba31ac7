//! Samples of what the model writes.

use std::ops::Bound::{Excluded, Included};

use candle_core::{Result, bail};
use candle_train_models::ModelConfig;
use candle_trainer::Tokenizer;
use clap::Args;
use serde::Serialize;

use crate::args::number::{real, whole};
use crate::flags::idle::Idle;

/// Flags of the samples.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct SampleArgs {
    /// Text that the samples before and after training continue [default: no samples]
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// Length of a sample; 0: no samples
    #[arg(long, default_value_t = 80, value_name = "TOKENS", value_parser = whole::<usize>(0..))]
    pub sample_tokens: usize,
    /// Randomness of the samples; 0: always the most likely token
    #[arg(long, default_value_t = 0.5, value_parser = real(0.0..))]
    pub temperature: f64,
    /// Samples take the most likely tokens that together have this probability
    #[arg(long, default_value_t = 0.9, value_name = "PROBABILITY", value_parser = real((Excluded(0.0), Included(1.0))))]
    pub top_p: f64,
}

impl SampleArgs {
    /// Flags that would do nothing.
    pub fn idle(&self) -> Vec<Idle> {
        const NO_SAMPLES: &str = "where nothing is sampled\nhint: --prompt names the text that samples continue, and --sample-tokens \
            more than 0 of them";
        let default = Self::default();
        let has_samples = self.prompt().is_some();
        let is_long = self.sample_tokens != 0 && self.sample_tokens != default.sample_tokens;
        let is_warm = self.temperature != default.temperature;
        let is_cut = self.top_p != default.top_p;
        Idle::of([
            (
                !has_samples && is_long,
                "sample-tokens",
                &["prompt"],
                NO_SAMPLES,
            ),
            (
                !has_samples && is_warm,
                "temperature",
                &["prompt", "sample-tokens"],
                NO_SAMPLES,
            ),
            (
                !has_samples && is_cut,
                "top-p",
                &["prompt", "sample-tokens"],
                NO_SAMPLES,
            ),
            (
                self.temperature == 0.0 && is_cut,
                "top-p",
                &["temperature"],
                "beside --temperature 0, which always takes the most likely token",
            ),
        ])
    }

    /// The text that samples continue, if there are to be samples.
    pub(crate) fn prompt(&self) -> Option<&str> {
        self.prompt.as_deref().filter(|_| self.sample_tokens > 0)
    }

    /// An error if the model cannot continue the prompt.
    pub(crate) fn check(&self, tokenizer: &Tokenizer, config: &ModelConfig) -> Result<()> {
        let Some(text) = self.prompt() else {
            return Ok(());
        };
        let prompt = tokenizer.encode_prompt(text)?;
        if prompt.is_empty() {
            bail!("--prompt {text:?} has no tokens; expected some text");
        }
        let (num_tokens, max) = (prompt.len(), config.max_text_len());
        if num_tokens > max {
            bail!(
                "--prompt has {num_tokens} tokens, and the model takes {max} at most (max_position_embeddings)"
            );
        }
        tokenizer.check_vocab(&prompt, config.vocab_size)
    }
}
