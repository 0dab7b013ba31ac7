//! A model that writes texts to stdout, token by token.

use std::io::stdout;
use std::ops::ControlFlow;
use std::path::PathBuf;

use candle_comm::{Mesh, ProcessGroup};
use candle_core::{Error, Result, bail};
use candle_launch::{has_no_reader, write_whole};
use candle_parallel::{ModelPart, Pipeline};
use candle_train_models::ModelConfig;
use candle_train_run::print_note;
use candle_trainer::{ChatTemplate, GenerateConfig, Sampler, SamplingConfig, Tokenizer, generate};

/// What the ranks share.
pub(crate) struct Model {
    pub(crate) dir: PathBuf,
    pub(crate) adapter: Option<PathBuf>,
    pub(crate) config: ModelConfig,
    pub(crate) tokenizer: Tokenizer,
    /// Of a conversation.
    pub(crate) template: Option<ChatTemplate>,
    pub(crate) limits: GenerateConfig,
    /// Whether a text that ends before `limits` at the model's positions is an error.
    pub(crate) must_fit: bool,
    pub(crate) sampling: SamplingConfig,
    /// Whether its files say how its texts are made.
    pub(crate) has_own_settings: bool,
}

/// One rank's model, with which texts are written.
pub(crate) struct Writer<'a> {
    pub(crate) model: &'a Model,
    pub(crate) mesh: Mesh,
    pub(crate) part: ModelPart,
    pub(crate) pipeline: Pipeline,
    pub(crate) sampler: Sampler,
    /// Whether it has been said how texts are made.
    pub(crate) has_told: bool,
    /// Whether it has been said that a text is longer than the model was made for.
    pub(crate) has_told_length: bool,
}

impl Model {
    /// How texts are made, for people.
    pub(crate) fn in_words(&self) -> String {
        let SamplingConfig {
            temperature,
            top_k,
            top_p,
            repetition_penalty,
            ..
        } = self.sampling;
        let choice = match temperature > 0.0 {
            true => format!("temperature {temperature}, top_k {top_k}, top_p {top_p}"),
            false => "the most likely token".to_string(),
        };
        let ends = &self.limits.eos_ids;
        format!("{choice}, repetition_penalty {repetition_penalty}, ends {ends:?}")
    }

    /// Bounds a text after a prompt of so many tokens by the model's positions, unless the model goes on beyond them.
    ///
    /// # Errors
    /// A prompt that is longer.
    pub(crate) fn limits_after(&self, num_tokens: usize) -> Result<GenerateConfig> {
        let (limits, max) = (&self.limits, self.config.max_text_len());
        if num_tokens > max {
            let (what, hint) = match self.template {
                Some(_) => ("conversation", "/clear begins anew, with a shorter turn"),
                None => ("prompt", "a shorter prompt"),
            };
            bail!(
                "the {what} has {num_tokens} tokens, and the model takes {max} at most (max_position_embeddings)\nhint: {hint}"
            );
        }
        // Nothing is computed of the last one.
        let room = (max - num_tokens).saturating_add(1);
        Ok(GenerateConfig {
            max_new_tokens: limits.max_new_tokens.min(room),
            ..limits.clone()
        })
    }
}

/// How a model goes on beyond its positions, in words, if it does.
fn beyond(config: &ModelConfig) -> Option<String> {
    if config.max_text_len() != usize::MAX {
        return None;
    }
    let positions = config.max_position_embeddings;
    if config.max_seq_len() == usize::MAX {
        return Some(format!(
            "the text is longer than the model's {positions} positions: from here on rope_type dynamic changes its frequencies"
        ));
    }
    let window = config.windows.iter().flatten().max()?;
    Some(format!(
        "the text is longer than the model's {positions} positions: from here on all but its last {} tokens are left out, of which a \
         layer sees {window} at a time",
        config.max_seq_len()
    ))
}

impl Writer<'_> {
    /// All ranks.
    pub(crate) fn world(&self) -> &ProcessGroup {
        &self.mesh.world
    }

    /// Writes what comes after a prompt, as it comes, and returns it, in both cases after the prompt if that `is_shown`: a decoder may leave out
    /// the space with which a text of its own would begin. Each of its tokens is followed by the question, which all ranks must answer alike,
    /// whether it `goes_on`.
    pub(crate) fn write(
        &mut self,
        prompt: &[u32],
        is_shown: bool,
        mut goes_on: impl FnMut() -> Result<ControlFlow<()>>,
    ) -> Result<String> {
        let (model, is_first) = (self.model, self.mesh.world.rank() == 0);
        let tokenizer = &model.tokenizer;
        tokenizer.check_vocab(prompt, model.config.vocab_size)?;
        if prompt.is_empty() {
            bail!("the prompt has no tokens; expected some text");
        }
        let is_special = model.sampling.temperature > 0.0 || model.has_own_settings;
        if is_first && !std::mem::replace(&mut self.has_told, true) && is_special {
            print_note(&model.in_words());
        }
        let limits = model.limits_after(prompt.len())?;
        let mut num_written = 0;
        let decode = |ids: &[u32]| match is_shown {
            true => tokenizer.decode(&[prompt, ids].concat()),
            false => tokenizer.decode(ids),
        };
        let mut show = |ids: &[u32]| -> Result<()> {
            let text = decode(ids)?;
            // Of a character in several tokens the first ones are no text yet.
            if let Some(new) = text
                .get(num_written..)
                .filter(|_| !text.ends_with('\u{fffd}'))
            {
                write_out(new)?;
                num_written = text.len();
            }
            Ok(())
        };
        let ids = generate(
            &self.pipeline,
            &self.part,
            prompt,
            &limits,
            &mut self.sampler,
            |ids| {
                if is_first {
                    show(ids)?;
                    let is_beyond = prompt.len() + ids.len() > model.config.max_position_embeddings;
                    if is_beyond && !std::mem::replace(&mut self.has_told_length, true) {
                        beyond(&model.config)
                            .iter()
                            .for_each(|line| print_note(line));
                    }
                }
                goes_on()
            },
        )?;
        let text = decode(&ids)?;
        if is_first {
            write_out(text.get(num_written..).unwrap_or_default())?;
            write_out("\n")?;
        }
        if ids.len() == limits.max_new_tokens && ids.len() < model.limits.max_new_tokens {
            let hint = match &model.template {
                Some(_) => "/clear begins anew".to_string(),
                None => format!(
                    "a shorter prompt, or --max-new-tokens {}",
                    limits.max_new_tokens
                ),
            };
            let said = format!(
                "the text has reached the model's {} positions (max_position_embeddings), and could be longer\nhint: {hint}",
                limits.max_context
            );
            if model.must_fit {
                return Err(Error::msg(said));
            }
            if is_first {
                print_note(&said);
            }
        }
        Ok(text)
    }
}

fn write_out(text: &str) -> Result<()> {
    match write_whole(&mut stdout().lock(), text.as_bytes()) {
        // Who reads has enough, as `head` has: nothing else is left to do.
        Err(err) if has_no_reader(&err) => std::process::exit(0),
        written => written.map_err(|err| Error::msg(format!("cannot write to stdout: {err}"))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{ModelConfig, beyond};

    #[test]
    fn only_models_that_are_made_for_it_go_on_beyond_their_positions() {
        let config = |edit: &dyn Fn(&mut Value)| {
            let mut config = json!({"model_type": "mistral", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
                "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
                "max_position_embeddings": 256, "sliding_window": null});
            edit(&mut config);
            ModelConfig::from_json(&config.to_string()).unwrap()
        };
        assert_eq!(beyond(&config(&|_| ())), None);
        let sliding = beyond(&config(&|config| config["sliding_window"] = 32.into()));
        assert!(
            sliding.is_some_and(
                |line| line.contains("its last 256 tokens") && line.contains("sees 32")
            )
        );
        let dynamic = beyond(&config(&|config| {
            config["rope_scaling"] = json!({"rope_type": "dynamic", "factor": 2.0});
        }));
        assert!(
            dynamic.is_some_and(|line| line.contains("256 positions") && line.contains("dynamic"))
        );
        let linear = beyond(&config(&|config| {
            config["rope_scaling"] = json!({"rope_type": "linear", "factor": 2.0});
        }));
        assert_eq!(linear, None);
    }
}
