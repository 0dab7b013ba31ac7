//! A model that writes texts to stdout, token by token.

use std::io::{ErrorKind, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;

use candle_comm::{Mesh, ProcessGroup};
use candle_core::{Error, Result, bail};
use candle_parallel::{ModelPart, Pipeline};
use candle_train_models::ModelConfig;
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
    /// Whether texts are made in another way than by the most likely token.
    pub(crate) fn is_special(&self) -> bool {
        self.sampling.temperature > 0.0 || self.has_own_settings
    }

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

    /// What bounds a text after a prompt of so many tokens: its end is at the model's positions, unless the model goes on beyond them.
    ///
    /// # Errors
    /// A prompt that is longer.
    fn limits_after(&self, num_tokens: usize) -> Result<GenerateConfig> {
        let limits = &self.limits;
        if beyond(&self.config).is_some() {
            return Ok(limits.clone());
        }
        if num_tokens > limits.max_context {
            bail!(
                "the prompt has {num_tokens} tokens, and the model takes {} at most (max_position_embeddings)\nhint: a shorter prompt or \
                 conversation",
                limits.max_context
            );
        }
        // Nothing is computed of the last one.
        let room = limits.max_context - num_tokens + 1;
        Ok(GenerateConfig {
            max_new_tokens: limits.max_new_tokens.min(room),
            ..limits.clone()
        })
    }
}

/// What a model does beyond its positions, in words, if it is made to go on there.
fn beyond(config: &ModelConfig) -> Option<String> {
    let positions = config.max_position_embeddings;
    if config.max_seq_len() == usize::MAX {
        return Some(format!(
            "the text is longer than the model's {positions} positions: from here on rope_type dynamic changes its frequencies"
        ));
    }
    let windows: Option<Vec<usize>> = (0..config.num_hidden_layers)
        .map(|layer| config.window(layer))
        .collect();
    let window = windows?.into_iter().max()?;
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

    /// Writes what comes after a prompt, as it comes, and returns it; each of its tokens is followed by the question, which all ranks
    /// must answer alike, whether it `goes_on`.
    pub(crate) fn answer(
        &mut self,
        prompt: &str,
        goes_on: impl FnMut() -> Result<ControlFlow<()>>,
    ) -> Result<String> {
        let ids = self.model.tokenizer.encode(prompt)?;
        self.write(&ids, false, goes_on)
    }

    /// As [`Self::answer`], of tokens, in both cases after the prompt if that `is_shown`: a decoder may leave out the space with which a
    /// text of its own would begin.
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
        if is_first && !std::mem::replace(&mut self.has_told, true) && model.is_special() {
            eprintln!("{}", model.in_words());
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
                            .for_each(|line| eprintln!("{line}"));
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
            bail!(
                "the text has reached the model's {} positions (max_position_embeddings), and could be longer\nhint: a shorter prompt or \
                 conversation, or --max-new-tokens {}",
                limits.max_context,
                limits.max_new_tokens
            );
        }
        Ok(text)
    }
}

fn write_out(text: &str) -> Result<()> {
    let mut out = std::io::stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // Who reads has enough, as `head` has: nothing else is left to do.
        Err(err) if err.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
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
