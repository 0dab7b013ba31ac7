//! `candle-train pretrain`

use std::path::PathBuf;
use std::process::ExitCode;

use candle_core::{Result, bail};
use candle_parallel::checkpoint::sidecar_files;
use candle_train::{Activity, Tokenizer};
use candle_train_models::ModelConfig;
use clap::Parser;
use serde_json::json;

use crate::choices::StorageChoice;
use crate::data_args::{DataArgs, DataModel};
use crate::flags::Flags;
use crate::lora_args::LoraArgs;
use crate::number::whole;
use crate::program::{FlagDefault, TrainingCommand};
use crate::samples::SampleArgs;
use crate::stop::Stop;
use crate::training_args::TrainingArgs;
use crate::training_run::{InitialWeights, TrainingRun};

/// Longest sequence that a new model may see where no flag says.
const MAX_POSITIONS: usize = 512;

/// Train a small Llama, and its tokenizer, from nothing on text
#[derive(Parser, Debug)]
pub struct Pretrain {
    #[command(flatten)]
    data: DataArgs,
    /// Folder for the checkpoint
    #[arg(
        long,
        visible_alias = "output-dir",
        default_value = "pretrained",
        value_name = "DIR"
    )]
    output: PathBuf,
    /// Folder of a tokenizer to use [default: a byte-level BPE is trained on the data]
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    #[command(flatten, next_help_heading = "Model")]
    model: ModelArgs,
    /// Type of the saved weights
    #[arg(
        long,
        ignore_case = true,
        default_value = "f32",
        help_heading = "Output"
    )]
    save_dtype: StorageChoice,
    #[command(flatten)]
    training: TrainingArgs,
    #[command(flatten)]
    samples: SampleArgs,
}

/// Sizes of the model.
#[derive(clap::Args, Debug)]
struct ModelArgs {
    /// Tokens of the trained tokenizer; not for --tokenizer, which has its own
    #[arg(long, default_value_t = 1024, value_name = "TOKENS", conflicts_with = "tokenizer", value_parser = whole::<usize>(1..))]
    vocab_size: usize,
    /// Width of the residual stream
    #[arg(long, default_value_t = 192, value_parser = whole::<usize>(1..))]
    hidden_size: usize,
    /// Width of the MLP
    #[arg(long, default_value_t = 512, value_parser = whole::<usize>(1..))]
    intermediate_size: usize,
    /// Number of layers
    #[arg(long, default_value_t = 4, value_parser = whole::<usize>(1..))]
    layers: usize,
    /// Number of query heads
    #[arg(long, default_value_t = 6, value_parser = whole::<usize>(1..))]
    heads: usize,
    /// Number of key/value heads
    #[arg(long, default_value_t = 2, value_parser = whole::<usize>(1..))]
    kv_heads: usize,
    /// Longest sequence the model may see, in tokens [default: 512, or --seq-len if that is more]
    #[arg(long, value_name = "TOKENS", value_parser = whole::<usize>(1..))]
    max_positions: Option<usize>,
    /// Give the head its own weight instead of the embedding's
    #[arg(long)]
    untied: bool,
}

impl Pretrain {
    /// What its flags are where they are not given, and where those of [`crate::Finetune`] have other defaults: the model is small and new.
    pub fn defaults() -> Vec<FlagDefault> {
        let values = [
            ("lr", "1e-3"),
            ("weight-decay", "0.1"),
            ("warmup-steps", "5"),
            ("seq-len", "128"),
            ("micro-batch-size", "4"),
            ("prompt", "The"),
        ];
        let default = |(flag, value)| FlagDefault {
            flag,
            value,
            description: value,
            unless: (flag == "warmup-steps").then_some("warmup-ratio"),
        };
        values.map(default).into()
    }
}

impl TrainingCommand for Pretrain {
    fn run(&self, flags: Flags) -> Result<ExitCode> {
        let stop = Stop::new(self.training.batches.max_secs);
        let mut training = self.training.clone();
        training.validate(&self.output)?;
        self.data.validate(&training.evaluation)?;
        let ranks = training.run_config_with_defaults()?;
        let taken = training.fill(&flags, None, &ranks);
        training.validate_filled()?;
        let seq_len = training.batches.sequences.seq_len;
        let longer = format!(", or --max-positions {seq_len}");
        training.check_model(&self.model.config(None, seq_len)?, &longer)?;
        let read = self.tokenizer.iter().cloned().collect();
        training.check_folders(&self.output, read, &ranks)?;
        let tokenizer = match &self.tokenizer {
            Some(dir) => Tokenizer::from_dir(dir)?,
            None => {
                let is_first = ranks.is_first();
                let _learning = is_first.then(|| Activity::start("learning the tokens"));
                let texts = self.data.find()?.texts()?;
                let texts = texts.iter().map(String::as_str);
                Tokenizer::train_bpe(texts, self.model.vocab_size)?
            }
        };
        let config = self.model.config(Some(&tokenizer), seq_len)?;
        training.check_model(&config, &longer)?;
        self.samples.check(&tokenizer, &config)?;
        let of_model = DataModel {
            tokenizer: &tokenizer,
            dir: self.tokenizer.as_deref(),
            adapter: None,
        };
        let data = self.data.read(of_model, (&training, &ranks))?;
        let inputs = self.tokenizer.iter().chain(&data.inputs).cloned();
        TrainingRun {
            training: &training,
            taken,
            samples: &self.samples,
            stop,
            title: format!("{}, vocabulary {}", self.data, config.vocab_size),
            sidecars: self.sidecars(&tokenizer, &config)?,
            inputs: inputs.collect(),
            data,
            tokenizer,
            config,
            initial_weights: InitialWeights::Random,
            lora: LoraArgs::default(),
            base_model: None,
            output: &self.output,
            save_dtype: Some(self.save_dtype.into()),
        }
        .run(ranks, flags)
    }
}

impl Pretrain {
    /// config.json and the tokenizer's files.
    fn sidecars(
        &self,
        tokenizer: &Tokenizer,
        config: &ModelConfig,
    ) -> Result<Vec<(String, Vec<u8>)>> {
        let mut files = match &self.tokenizer {
            Some(dir) => sidecar_files(dir)?,
            None => {
                let dir = tempfile::tempdir()?;
                tokenizer.save(dir.path())?;
                sidecar_files(dir.path())?
            }
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
