//! Which parameters a run leaves as they are.

use candle_core::{Result, bail};
use candle_parallel::{ParamSpec, ParamStore};
use clap::Args;
use serde::Serialize;

use crate::args::text::some_text;
use regex::Regex;

/// `--freeze`
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct FreezeArgs {
    /// Freeze the parameters in whose Hugging Face name this regular expression finds a match, such as
    /// 'embed_tokens|layers\.[0-3]\.': no gradient, no optimizer state, no change [default: none]
    #[arg(long, value_name = "PATTERN", value_parser = pattern)]
    #[serde(serialize_with = "some_text")]
    pub freeze: Option<Regex>,
}

/// A regular expression, or in one line what is wrong with it.
fn pattern(text: &str) -> std::result::Result<Regex, String> {
    Regex::new(text).map_err(|err| {
        let message = err.to_string();
        let last = message.lines().last().unwrap_or_default();
        last.trim_start_matches("error: ").to_string()
    })
}

impl FreezeArgs {
    /// The store, told what to freeze.
    pub fn apply(&self, store: ParamStore) -> ParamStore {
        match self.freeze.clone() {
            None => store,
            Some(pattern) => store.freeze(move |name| pattern.is_match(name)),
        }
    }

    /// An error, the same on every rank, if the pattern froze nothing or left nothing to train.
    ///
    /// # Errors
    /// The pattern, with the names it could have meant.
    pub fn check(&self, params: &[ParamSpec]) -> Result<()> {
        let Some(pattern) = &self.freeze else {
            return Ok(());
        };
        let example = params.first().map_or("", |entry| &entry.name);
        let num_trainable = params.iter().filter(|entry| entry.trainable).count();
        if num_trainable == params.len() {
            bail!(
                "--freeze {pattern} matches none of the {} parameters\nhint: they have Hugging Face names, such as {example}",
                params.len()
            );
        }
        if num_trainable == 0 {
            bail!(
                "--freeze {pattern} matches all {} parameters: nothing is left to train\nhint: they have Hugging Face names, such as {example}",
                params.len()
            );
        }
        Ok(())
    }
}
