//! `candle-train generate`

use std::ops::Bound::{Excluded, Included, Unbounded};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use candle_comm::{Degrees, Mesh, launch};
use candle_core::{DType, Result, bail};
use candle_parallel::{Adapter, ParamStore, Pipeline, Schedule, WeightFormat};
use candle_train_models::{CausalLm, ModelConfig};
use candle_train_run::{
    GenerationFile, Idle, NamedModel, RankArgs, check_base, float_type, other_forms, print_note,
    real, whole,
};
use candle_trainer::hub::resolve_model;
use candle_trainer::{
    ChatTemplate, GenerateConfig, Sampler, SamplingConfig, TemplateKwargs, Tokenizer,
};
use clap::Parser;
use jiff::civil::Date;

use crate::commands::chat::Conversation;
use crate::commands::writer::{Model, Writer};

const A_WEEK: Duration = Duration::from_secs(604_800);
/// Where no flag says.
const MAX_NEW_TOKENS: usize = 256;

/// Let a model continue a text, or answer in a chat
#[derive(Parser, Debug)]
pub(crate) struct Generate {
    /// Checkpoint folder, or org/name[@revision] on the Hugging Face hub; or folder of low-rank adapters, with which the model goes that they
    /// were trained on, if it is here
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
    /// Chat template of the conversation: chatml, llama3, qwen, mistral, gemma, zephyr, or a file of Jinja [default: the model's own, or the
    /// adapter's]
    #[arg(long, value_name = "FILE|NAME")]
    chat_template: Option<String>,
    /// Variables for the chat template, a JSON object such as '{"enable_thinking": false}' [default: none]
    #[arg(long, value_name = "JSON")]
    chat_template_kwargs: Option<TemplateKwargs>,
    /// What a chat template that asks for the date takes for today [default: today]
    #[arg(long, value_name = "YYYY-MM-DD")]
    date: Option<Date>,
    /// Longest continuation or answer; a continuation that does not fit the model's positions is an error [default: 256, or what fits]
    #[arg(long, value_name = "TOKENS", value_parser = whole::<usize>(1..))]
    max_new_tokens: Option<usize>,
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
    #[arg(long, ignore_case = true, default_value = "f32", value_parser = float_type())]
    dtype: DType,
    /// Form in which the model's weights are held; q8_0 and q4k take the least memory, of which a token reads all [default: --dtype]
    ///
    /// It is a number's type, or blocks of 8.5 (q8_0) or 4.5 bits a value (q4k); embedding and head are in bf16 then.
    #[arg(long, ignore_case = true, value_name = "FORM")]
    base_dtype: Option<WeightFormat>,
    #[command(flatten, next_help_heading = "Ranks")]
    pub ranks: RankArgs,
}

impl Generate {
    /// Flags that would do nothing.
    pub fn idle(&self) -> Vec<Idle> {
        let is_narrow = self.dtype != DType::F32;
        Idle::of([
            (
                self.temperature == Some(0.0) && self.top_p.is_some(),
                "top-p",
                &["temperature"],
                "beside --temperature 0, which always takes the most likely token",
            ),
            (
                is_narrow && self.ranks.matmul_precision.is_some(),
                "matmul-precision",
                &["dtype"],
                "beside --dtype bf16 or f16, and is about products of f32",
            ),
        ])
    }

    /// Writes to stdout.
    pub fn run(&self) -> Result<()> {
        let degrees = Degrees {
            tp: self.tp,
            ..Degrees::default()
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
        if self.chat_template.is_some() && !self.chat {
            bail!("--chat-template is given without --chat: a text is not rendered");
        }
        if self.chat_template_kwargs.is_some() && !self.chat {
            bail!("--chat-template-kwargs is given without --chat: a text is not rendered");
        }
        let mut ranks = self.ranks.config(degrees)?;
        if self.chat {
            // The other ranks wait for the first one, which waits for a person.
            ranks.deadline = ranks.deadline.max(A_WEEK);
        }
        let named = NamedModel::of_flags(&self.model, self.adapter.as_deref())?;
        let model = self.model(&named)?;
        CausalLm::check_degrees(&model.config, &degrees)?;
        let adapter = named.adapter.as_deref();
        let warning = adapter.map_or(Ok(None), |dir| check_base(dir, &named.model, &model.dir))?;
        if ranks.is_first() {
            if named.model != self.model {
                print_note(&format!(
                    "{} is an adapter: it is used with its model, {}",
                    self.model, named.model
                ));
            }
            // Other markers in several tokens are no trouble to a model that has learned them so.
            let chosen = model
                .template
                .as_ref()
                .filter(|_| self.chat_template.is_some());
            let fit = chosen.map(|template| template.fit(&model.tokenizer));
            let fit = fit.filter(|fit| fit.end_of_turn_id.is_none());
            for warning in warning.into_iter().chain(fit.and_then(|fit| fit.warning())) {
                print_note(&format!("warning: {warning}"));
            }
        }
        launch::run(&ranks, |world| {
            self.ranks.settle();
            let mut writer = self.writer(&model, Mesh::new(world, degrees)?)?;
            match &model.template {
                None => {
                    let prompt = self.prompt.as_deref().unwrap_or_default();
                    let ids = model.tokenizer.encode_prompt(prompt)?;
                    writer.write(&ids, true, go_on).map(drop)
                }
                Some(template) => Conversation::new(template, self.system.clone())
                    .hold(self.prompt.as_deref(), &mut writer),
            }
        })?;
        Ok(())
    }

    fn model(&self, named: &NamedModel) -> Result<Model> {
        let dir = resolve_model(&named.model)?;
        let config = ModelConfig::from_file(dir.join("config.json"))?;
        let tokenizer = Tokenizer::from_dir(&dir)?;
        let generation = GenerationFile::read(&dir, named.adapter.as_deref())?;
        let template = match self.chat {
            false => None,
            true => Some(self.template(named, &dir, &tokenizer)?),
        };
        let mut eos_ids = generation.eos_ids(&config).to_vec();
        // Of a base model the file may not know how a turn of a conversation ends.
        let eos_id = tokenizer.eos_id();
        let end_of_turn = template
            .as_ref()
            .and_then(|it| it.fit(&tokenizer).end_of_turn_id);
        for id in end_of_turn.into_iter().chain([eos_id]) {
            if (self.chat || eos_ids.is_empty()) && !eos_ids.contains(&id) {
                eos_ids.push(id);
            }
        }
        Ok(Model {
            limits: GenerateConfig {
                max_context: config.max_seq_len(),
                max_new_tokens: self.max_new_tokens.unwrap_or(MAX_NEW_TOKENS),
                eos_ids,
                use_cache: true,
            },
            must_fit: self.max_new_tokens.is_some() && !self.chat,
            sampling: self.sampling(&generation)?,
            has_own_settings: generation != GenerationFile::default(),
            adapter: named.adapter.clone(),
            dir,
            config,
            tokenizer,
            template,
        })
    }

    /// The template of a conversation with the model in `dir`.
    fn template(
        &self,
        named: &NamedModel,
        dir: &Path,
        tokenizer: &Tokenizer,
    ) -> Result<ChatTemplate> {
        let of_model = || {
            let special_tokens = tokenizer.named_special_tokens().clone();
            ChatTemplate::from_dir(dir, special_tokens).transpose()
        };
        let (choice, adapter) = (self.chat_template.as_deref(), named.adapter.as_deref());
        let template = ChatTemplate::in_place_of_own(Some(dir), choice, adapter, tokenizer);
        match template.transpose().or_else(of_model) {
            Some(template) => self.chosen(template?),
            None => bail!(
                "--chat: the model in {} has no chat template\nhint: a base model continues texts: use --prompt alone; one that was trained \
                 on conversations elsewhere takes the template of these by --chat-template, such as chatml",
                dir.display()
            ),
        }
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

    /// The template on the date and with the variables that flags name.
    fn chosen(&self, template: ChatTemplate) -> Result<ChatTemplate> {
        let template = match &self.chat_template_kwargs {
            Some(kwargs) => template.with_kwargs(kwargs.clone())?,
            None => template,
        };
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
        let store = match &model.adapter {
            Some(dir) => store.with_adapter(Adapter::open(dir)?)?,
            None => store.freeze(|_| true),
        };
        let store = match self.base_dtype {
            Some(format) => store.with_frozen_format(format),
            None => store,
        };
        if mesh.world.rank() == 0
            && let Some(warning) = self.ranks.warning_of_precision(mesh.world.device())
        {
            print_note(&format!("warning: {warning}"));
        }
        let vb = store.builder(self.dtype, mesh.world.device());
        let part = CausalLm::part(&model.config, &mesh, &vb)?;
        if let (Some(format), 0) = (self.base_dtype, mesh.world.rank()) {
            let lines = other_forms(format, part.params());
            lines.iter().for_each(|line| print_note(line));
        }
        Ok(Writer {
            part,
            pipeline: Pipeline::new(Schedule::GPipe, &mesh),
            sampler: Sampler::new(model.sampling.clone())?,
            has_told: false,
            has_told_length: false,
            model,
            mesh,
        })
    }
}

/// A text that nothing ends before its time.
fn go_on() -> Result<ControlFlow<()>> {
    Ok(ControlFlow::Continue(()))
}
