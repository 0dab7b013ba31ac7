//! `candle-train generate`

use std::io::{BufRead, ErrorKind, IsTerminal, Write};
use std::ops::Bound::{Excluded, Included, Unbounded};
use std::path::PathBuf;
use std::time::Duration;

use candle_comm::{Degrees, Mesh, ProcessGroup, launch};
use candle_core::{Error, Result, bail};
use candle_parallel::{Adapter, ParamStore, Stage};
use candle_train::hub::resolve_model;
use candle_train::{
    Chat, ChatTemplate, GenerateConfig, Sampler, SamplingConfig, Tokenizer, generate,
};
use candle_train_models::{CausalLm, ModelConfig};
use clap::Parser;
use jiff::civil::Date;
use serde_json::{Value, json};

use crate::adapter_base::check_base;
use crate::choices::DTypeChoice;
use crate::generation_config::GenerationFile;
use crate::number::{real, whole};
use crate::rank_args::RankArgs;

const A_WEEK: Duration = Duration::from_secs(604_800);

/// Let a model continue a text, or answer in a chat
#[derive(Parser, Debug)]
pub(crate) struct Generate {
    /// Checkpoint folder, or org/name[@revision] on the Hugging Face hub
    #[arg(long, value_name = "DIR|REPO")]
    model: String,
    /// Folder of low-rank adapters that go with it [default: none]
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Text to continue
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Answer the lines of stdin, one after the other, as turns of a conversation in the model's chat template; with --prompt that is the first
    #[arg(long)]
    chat: bool,
    /// What the conversation begins with, as the system's message [default: nothing]
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// What a chat template that asks for the date takes for today [default: today]
    #[arg(long, value_name = "YYYY-MM-DD")]
    date: Option<Date>,
    /// Longest continuation or answer
    #[arg(long, default_value_t = 256, value_name = "TOKENS", value_parser = whole::<usize>(1..))]
    max_new_tokens: usize,
    /// Randomness; 0: always the most likely token [default: that of generation_config.json, else 0]
    #[arg(long, value_parser = real(0.0..))]
    temperature: Option<f64>,
    /// Take one of so many most likely tokens; 0: of all [default: that of generation_config.json, else 50]
    #[arg(long, value_name = "TOKENS", value_parser = whole::<usize>(0..))]
    top_k: Option<usize>,
    /// Of these the most likely tokens that together have this probability [default: that of generation_config.json, else 1]
    #[arg(long, value_name = "PROBABILITY", value_parser = real((Excluded(0.0), Included(1.0))))]
    top_p: Option<f64>,
    /// Divide the logits of tokens that are there already by this, or multiply those below 0; 1: leave them [default: that of
    /// generation_config.json, else 1]
    #[arg(long, value_name = "FACTOR", value_parser = real((Excluded(0.0), Unbounded)))]
    repetition_penalty: Option<f64>,
    /// Seed of the choice
    #[arg(long, default_value_t = 0, value_parser = whole::<u64>(0..))]
    seed: u64,
    /// Tensor-parallel degree: ranks that share each layer
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = whole::<usize>(1..))]
    tp: usize,
    /// Type of weights and activations
    #[arg(long, default_value = "f32")]
    dtype: DTypeChoice,
    #[command(flatten, next_help_heading = "Ranks")]
    ranks: RankArgs,
}

/// What the ranks share.
struct Model {
    dir: PathBuf,
    config: ModelConfig,
    tokenizer: Tokenizer,
    /// Of a conversation.
    template: Option<ChatTemplate>,
    limits: GenerateConfig,
    sampling: SamplingConfig,
    /// Whether its files say how its texts are made.
    has_own_settings: bool,
}

/// One rank's model, with which texts are written.
struct Writer<'a> {
    model: &'a Model,
    mesh: Mesh,
    stage: Stage,
    sampler: Sampler,
    /// Whether it has been said how texts are made.
    has_told: bool,
}

impl Model {
    /// Whether texts are made in another way than by the most likely token.
    fn is_special(&self) -> bool {
        self.sampling.temperature > 0.0 || self.has_own_settings
    }

    /// How texts are made, for people.
    fn in_words(&self) -> String {
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

impl Generate {
    /// Writes to stdout.
    pub fn run(&self) -> Result<()> {
        let degrees = Degrees {
            pp: 1,
            dp: 1,
            cp: 1,
            tp: self.tp,
        };
        if self.prompt.is_none() && !self.chat {
            bail!("there is nothing to continue: neither --prompt nor --chat is given");
        }
        if self.system.is_some() && !self.chat {
            bail!("--system is given without --chat: a text has no system's message");
        }
        if self.date.is_some() && !self.chat {
            bail!("--date is given without --chat: only a chat template asks for the date");
        }
        let mut ranks = self.ranks.config(degrees)?;
        if self.chat {
            // The other ranks wait for the first one, which waits for a person.
            ranks.deadline = ranks.deadline.max(A_WEEK);
        }
        let model = self.model()?;
        CausalLm::check_degrees(&model.config, &degrees)?;
        let adapter = self.adapter.as_deref();
        let warning = adapter.map_or(Ok(None), |dir| check_base(dir, &self.model, &model.dir))?;
        if let Some(warning) = warning.filter(|_| ranks.is_first()) {
            eprintln!("warning: {warning}");
        }
        launch::run(&ranks, |world| {
            let mut writer = self.writer(&model, Mesh::new(world, degrees)?)?;
            match &model.template {
                None => {
                    let prompt = self.prompt.as_deref().unwrap_or_default();
                    let ids = model.tokenizer.encode_prompt(prompt)?;
                    writer.write(&ids, true).map(drop)
                }
                Some(template) => self.chat(template, &mut writer),
            }
        })?;
        Ok(())
    }

    fn model(&self) -> Result<Model> {
        let dir = resolve_model(&self.model)?;
        let config = ModelConfig::from_file(dir.join("config.json"))?;
        let tokenizer = Tokenizer::from_dir(&dir)?;
        let generation = GenerationFile::read(&dir)?;
        let template = match self.chat {
            false => None,
            true => {
                let special_tokens = tokenizer.named_special_tokens().clone();
                match ChatTemplate::from_dir(&dir, special_tokens)? {
                    Some(template) => Some(self.dated(template)?),
                    None => bail!(
                        "--chat: the model in {} has no chat template\nhint: a base model continues texts: use --prompt alone",
                        dir.display()
                    ),
                }
            }
        };
        let mut eos_ids = match generation.eos_ids.as_slice() {
            [] => config.eos_token_ids.clone(),
            ids => ids.to_vec(),
        };
        // Of a base model the file may not know how a turn of a conversation ends.
        let eos_id = tokenizer.eos_id();
        if (self.chat || eos_ids.is_empty()) && !eos_ids.contains(&eos_id) {
            eos_ids.push(eos_id);
        }
        Ok(Model {
            limits: GenerateConfig {
                vocab_size: config.vocab_size,
                max_context: config.max_seq_len(),
                max_new_tokens: self.max_new_tokens,
                eos_ids,
                use_cache: true,
            },
            sampling: self.sampling(&generation)?,
            has_own_settings: generation != GenerationFile::default(),
            dir,
            config,
            tokenizer,
            template,
        })
    }

    /// How tokens are chosen: as the flags say, else the model's file.
    fn sampling(&self, file: &GenerationFile) -> Result<SamplingConfig> {
        let penalty = self.repetition_penalty.or(file.repetition_penalty);
        let greedy = SamplingConfig {
            temperature: self.temperature.unwrap_or(file.temperature()),
            repetition_penalty: penalty.unwrap_or(1.0),
            seed: self.seed,
            ..SamplingConfig::default()
        };
        if greedy.temperature > 0.0 {
            return Ok(SamplingConfig {
                top_k: self.top_k.unwrap_or(file.top_k()),
                top_p: self.top_p.or(file.top_p).unwrap_or(1.0),
                ..greedy
            });
        }
        let flags = [
            ("--top-k", self.top_k.is_some()),
            ("--top-p", self.top_p.is_some()),
        ];
        match flags.iter().find(|(_, is_given)| *is_given) {
            None => Ok(greedy),
            Some((flag, _)) => bail!(
                "{flag} is given, and the most likely token is taken always, as the temperature is 0\nhint: give --temperature too, such as 0.7"
            ),
        }
    }

    fn dated(&self, template: ChatTemplate) -> Result<ChatTemplate> {
        match (self.date, template.date()) {
            (Some(date), None) => {
                bail!("--date {date} is given, and the model's chat template prints no date")
            }
            (Some(date), Some(_)) => Ok(template.with_date(date)),
            (None, _) => Ok(template),
        }
    }

    fn writer<'a>(&self, model: &'a Model, mesh: Mesh) -> Result<Writer<'a>> {
        let store = ParamStore::from_pretrained(&model.dir)?;
        let store = match &self.adapter {
            Some(dir) => store.with_adapter(Adapter::open(dir)?)?,
            None => store,
        };
        if mesh.world.rank() == 0 {
            self.ranks.warn_of_idle_precision(mesh.world.device());
        }
        let vb = store.builder(self.dtype.into(), mesh.world.device());
        Ok(Writer {
            stage: CausalLm::stage(&model.config, &mesh, &vb)?,
            sampler: Sampler::new(model.sampling.clone())?,
            has_told: false,
            model,
            mesh,
        })
    }

    fn chat(&self, template: &ChatTemplate, writer: &mut Writer<'_>) -> Result<()> {
        let message = |role: &str, content: &str| json!({"role": role, "content": content});
        let system = self.system.iter();
        let mut messages: Vec<Value> = system.map(|text| message("system", text)).collect();
        let mut first = self.prompt.clone();
        let mut num_turns = 0;
        loop {
            let turn = match first.take() {
                Some(turn) => Some(turn),
                None => read_turn(&writer.mesh.world)?,
            };
            let Some(turn) = turn else {
                if num_turns == 0 {
                    bail!(
                        "--chat: stdin ended before a line that says something\nhint: ranks that candle-train launch starts have no stdin: \
                         without it --tp N runs them as threads; or give the first turn as --prompt"
                    );
                }
                return Ok(());
            };
            num_turns += 1;
            messages.push(message("user", &turn));
            let chat = Chat::from_json(&messages).map_err(Error::msg)?;
            let ids = writer
                .model
                .tokenizer
                .encode(&template.generation_prompt(&chat)?)?;
            let answer = writer.write(&ids, false)?;
            messages.push(message("assistant", answer.trim()));
        }
    }
}

impl Writer<'_> {
    /// Writes what comes after these tokens, as it comes, and returns it, in both cases after the prompt if that `is_shown`: a decoder may
    /// leave out the space with which a text of its own would begin.
    fn write(&mut self, prompt: &[u32], is_shown: bool) -> Result<String> {
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
            &self.stage,
            &self.mesh.pp,
            prompt,
            &model.limits,
            &mut self.sampler,
            |ids| if is_first { show(ids) } else { Ok(()) },
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

/// The next line of the first rank's stdin that says something, for all ranks.
fn read_turn(world: &ProcessGroup) -> Result<Option<String>> {
    let mut line = Vec::new();
    if world.rank() == 0 {
        let stdin = std::io::stdin();
        while line.trim_ascii().is_empty() {
            if stdin.is_terminal() {
                eprint!("> ");
            }
            line.clear();
            if stdin.lock().read_until(b'\n', &mut line)? == 0 {
                break;
            }
        }
    }
    let lines = world.all_gather_bytes(line.trim_ascii())?;
    let line = lines.into_iter().next().unwrap_or_default();
    let line = String::from_utf8_lossy(&line).into_owned();
    Ok(Some(line).filter(|line| !line.is_empty()))
}
