//! A run that begins with random weights: `candle-train pretrain`.

use std::path::PathBuf;

use candle_core::{Result, bail};
use candle_parallel::checkpoint::sidecar_files;
use candle_train_models::ModelConfig;
use candle_trainer::{Activity, Tokenizer};
use clap::Args;
use serde::Serialize;
use serde_json::json;
use toml::{Table, Value};

use crate::args::data::DataArgs;
use crate::args::number::whole;
use crate::run::Run;
use crate::start::Start;
use crate::start::initial_weights::InitialWeights;
use crate::start::start_model::StartModel;

/// Longest sequence that a new model may see where no flag says.
const MAX_POSITIONS: usize = 512;

/// A run that trains a small Llama, and its tokenizer, from nothing on text.
pub type Pretrain = Run<FromScratch>;

/// Random weights, of a model of these sizes.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct FromScratch {
    /// Folder of a tokenizer to use [default: a byte-level BPE is trained on the data]
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Sizes of the model.
    #[command(flatten, next_help_heading = "Model")]
    pub model: ModelArgs,
}

/// Sizes of the model.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct ModelArgs {
    /// Tokens of the trained tokenizer; not for --tokenizer, which has its own
    #[arg(long, default_value_t = 1024, value_name = "TOKENS", conflicts_with = "tokenizer", value_parser = whole::<usize>(1..))]
    pub vocab_size: usize,
    /// Width of the residual stream
    #[arg(long, default_value_t = 192, value_parser = whole::<usize>(1..))]
    pub hidden_size: usize,
    /// Width of the MLP
    #[arg(long, default_value_t = 512, value_parser = whole::<usize>(1..))]
    pub intermediate_size: usize,
    /// Number of layers
    #[arg(long, default_value_t = 4, value_parser = whole::<usize>(1..))]
    pub layers: usize,
    /// Number of query heads
    #[arg(long, default_value_t = 6, value_parser = whole::<usize>(1..))]
    pub heads: usize,
    /// Number of key/value heads
    #[arg(long, default_value_t = 2, value_parser = whole::<usize>(1..))]
    pub kv_heads: usize,
    /// Longest sequence the model may see, in tokens [default: 512, or --seq-len if that is more]
    #[arg(long, value_name = "TOKENS", value_parser = whole::<usize>(1..))]
    pub max_positions: Option<usize>,
    /// Give the head its own weight instead of the embedding's
    #[arg(long)]
    pub untied: bool,
}

impl Start for FromScratch {
    const COMMAND: &'static str = "pretrain";

    /// The model is small and new.
    fn defaults() -> Table {
        let text = |text: &str| Value::String(text.to_string());
        let defaults = [
            ("output", text("pretrained")),
            ("save-dtype", text("f32")),
            ("lr", Value::Float(1e-3)),
            ("weight-decay", Value::Float(0.1)),
            ("warmup-steps", Value::Integer(5)),
            ("seq-len", Value::Integer(128)),
            ("micro-batch-size", Value::Integer(4)),
            ("prompt", text("The")),
        ];
        let defaults = defaults.map(|(flag, value)| (flag.to_string(), value));
        defaults.into_iter().collect()
    }

    fn shared(&self) -> Self {
        Self {
            tokenizer: None,
            ..self.clone()
        }
    }

    fn longer(&self, _config: &ModelConfig, seq_len: usize) -> String {
        format!(", or --max-positions {seq_len}")
    }

    fn model(run: &Pretrain, _needs_weights: bool) -> Result<StartModel> {
        let FromScratch { tokenizer, model } = &run.start;
        Ok(StartModel {
            config: model.config(None, run.training.batches.sequences.seq_len())?,
            dir: tokenizer.clone(),
            weights: InitialWeights::Random,
            name: None,
            sidecars: Vec::new(),
            inputs: tokenizer.iter().cloned().collect(),
        })
    }

    fn tokenizer(
        run: &Pretrain,
        model: &mut StartModel,
        is_first: bool,
    ) -> Result<Option<Tokenizer>> {
        let sizes = &run.start.model;
        let tokenizer = match &run.start.tokenizer {
            Some(dir) => Tokenizer::from_dir(dir)?,
            None => {
                let _learning = is_first.then(|| Activity::start("learning the tokens"));
                let texts = run.data.find()?.texts()?;
                let texts = texts.iter().map(String::as_str);
                Tokenizer::train_bpe(texts, sizes.vocab_size)?
            }
        };
        let seq_len = run.training.batches.sequences.seq_len();
        model.config = sizes.config(Some(&tokenizer), seq_len)?;
        model.sidecars = run.start.sidecars(&tokenizer, &model.config)?;
        Ok(Some(tokenizer))
    }

    fn title(&self, data: &DataArgs, model: &StartModel) -> String {
        format!("{data}, vocabulary {}", model.config.vocab_size)
    }
}

impl FromScratch {
    /// config.json and the tokenizer's files.
    fn sidecars(
        &self,
        tokenizer: &Tokenizer,
        config: &ModelConfig,
    ) -> Result<Vec<(String, Vec<u8>)>> {
        let mut files = match &self.tokenizer {
            Some(dir) => sidecar_files(dir)?,
            None => tokenizer.files()?,
        };
        files.retain(|(name, _)| name != "config.json" && name != "generation_config.json");
        files.push(("config.json".to_string(), config.to_json()?.into_bytes()));
        Ok(files)
    }
}

impl ModelArgs {
    /// The model for this tokenizer; before there is one, that for as many tokens as were asked for.
    fn config(&self, tokenizer: Option<&Tokenizer>, seq_len: usize) -> Result<ModelConfig> {
        let (hidden_size, heads) = (self.hidden_size, self.heads);
        // The heads share the residual stream's width.
        if !hidden_size.is_multiple_of(heads) {
            bail!(
                "--hidden-size({hidden_size}) % --heads({heads}) = {} != 0\nhint: choose a --hidden-size that is a multiple of {heads}",
                hidden_size % heads
            );
        }
        let config = json!({
            "model_type": "llama",
            "vocab_size": tokenizer.map_or(self.vocab_size, Tokenizer::vocab_size),
            "hidden_size": hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": self.max_positions.unwrap_or(MAX_POSITIONS.max(seq_len)),
            "tie_word_embeddings": !self.untied,
            "bos_token_id": tokenizer.and_then(Tokenizer::bos_id),
            "eos_token_id": tokenizer.map(Tokenizer::eos_id),
        });
        ModelConfig::from_json(&config.to_string())
    }
}
