//! A model that writes texts to stdout, token by token.

use std::io::{ErrorKind, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;

use candle_comm::{Mesh, ProcessGroup};
use candle_core::{Result, bail};
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
            &model.limits,
            &mut self.sampler,
            |ids| {
                if is_first {
                    show(ids)?;
                }
                goes_on()
            },
        )?;
        let text = decode(&ids)?;
        if is_first {
            write_out(text.get(num_written..).unwrap_or_default())?;
            write_out("\n")?;
        }
        Ok(text)
    }
}

fn write_out(text: &str) -> Result<()> {
    let mut out = std::io::stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // Who reads has enough, as `head` has: nothing else is left to do.
        Err(err) if err.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        written => Ok(written?),
    }
}
