//! `candle-train finetune`

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use candle_core::{Error, Result, bail};
use candle_parallel::checkpoint::sidecar_files;
use candle_train::Tokenizer;
use candle_train::hub::resolve_model;
use candle_train_models::{Family, ModelConfig};
use clap::Parser;
use serde_json::Value;

use crate::adapter_base::refuse_adapter;
use crate::choices::StorageChoice;
use crate::data_args::{DataArgs, DataModel};
use crate::flags::Flags;
use crate::lora_args::LoraArgs;
use crate::program::TrainingCommand;
use crate::samples::SampleArgs;
use crate::stop::Stop;
use crate::training_args::TrainingArgs;
use crate::training_run::{InitialWeights, TrainingRun};

/// Fine-tune a Hugging Face checkpoint on conversations or text
#[derive(Parser, Debug)]
pub struct Finetune {
    /// Checkpoint folder, or org/name[@revision] on the Hugging Face hub
    #[arg(long, value_name = "DIR|REPO", long_help = model_help())]
    model: String,
    /// Lengthen the model's context to so many times its original one, such as yarn:4: YaRN's rotary frequencies, which the output's config.json names too
    #[arg(long, value_name = "yarn:FACTOR", value_parser = yarn_factor)]
    rope_scaling: Option<f64>,
    #[command(flatten)]
    data: DataArgs,
    /// Folder for the fine-tuned checkpoint, or for the adapter
    #[arg(
        long,
        visible_alias = "output-dir",
        default_value = "finetuned",
        value_name = "DIR"
    )]
    output: PathBuf,
    /// Type of the saved weights [default: each tensor's own in the input checkpoint]
    #[arg(long, ignore_case = true, help_heading = "Output")]
    save_dtype: Option<StorageChoice>,
    #[command(flatten, next_help_heading = "Adapters")]
    lora: LoraArgs,
    #[command(flatten)]
    training: TrainingArgs,
    #[command(flatten)]
    samples: SampleArgs,
}

/// The factor of `yarn:FACTOR`.
fn yarn_factor(text: &str) -> std::result::Result<f64, String> {
    let factor = text.strip_prefix("yarn:").and_then(|it| it.parse().ok());
    factor
        .filter(|factor: &f64| factor.is_finite() && *factor > 1.0)
        .ok_or_else(|| "expected yarn:FACTOR with a factor above 1, such as yarn:4".to_string())
}

fn model_help() -> String {
    format!(
        "Checkpoint folder, or org/name[@revision] on the Hugging Face hub. Families: {}",
        Family::names()
    )
}

impl TrainingCommand for Finetune {
    fn run(&self, flags: Flags) -> Result<ExitCode> {
        let stop = Stop::new(self.training.batches.max_secs);
        let mut training = self.training.clone();
        training.validate(&self.output)?;
        self.lora.validate()?;
        self.data.validate(&training.evaluation)?;
        let ranks = training.run_config_with_defaults()?;
        refuse_adapter(&self.model)?;
        let model = resolve_model(&self.model)?;
        let mut sidecars = sidecar_files(&model)?;
        let config = self.config(&model, &mut sidecars)?;
        let taken = training.fill(&flags, Some(&config), &ranks);
        training.validate_filled()?;
        let seq_len = training.batches.sequences.seq_len;
        let original = config.original_context().filter(|_| !self.lora.is_given());
        let longer = original.map(|original| {
            let factor = seq_len.div_ceil(original).max(2);
            format!(", or --rope-scaling yarn:{factor} for a model of longer texts")
        });
        training.check_model(&config, &longer.unwrap_or_default())?;
        let tokenizer = Tokenizer::from_dir(&model)?;
        self.samples.check(&tokenizer, &config)?;
        let weights = InitialWeights::Checkpoint(model.clone());
        weights.check(&config, &training, &self.lora)?;
        let adapter = self.lora.adapter.as_deref();
        let mut inputs: Vec<PathBuf> = vec![model.clone()];
        inputs.extend(self.lora.adapter.clone());
        training.check_folders(&self.output, inputs.clone(), &ranks)?;
        let of_model = DataModel {
            tokenizer: &tokenizer,
            dir: Some(&model),
            adapter,
        };
        let data = self.data.read(of_model, (&training, &ranks))?;
        inputs.extend(data.inputs.iter().cloned());
        TrainingRun {
            training: &training,
            taken,
            samples: &self.samples,
            stop,
            tokenizer,
            title: self.title(&model, &config),
            sidecars,
            inputs,
            data,
            lora: self.lora.clone(),
            base_model: Some(&self.model),
            config,
            initial_weights: weights,
            output: &self.output,
            save_dtype: self.save_dtype.map(Into::into),
        }
        .run(ranks, flags)
    }
}

impl Finetune {
    /// The model's configuration; one with other frequencies takes the place of its own among `sidecars`.
    fn config(&self, model: &Path, sidecars: &mut [(String, Vec<u8>)]) -> Result<ModelConfig> {
        let path = model.join("config.json");
        let config = ModelConfig::from_file(&path)?;
        let Some(factor) = self.rope_scaling else {
            return Ok(config);
        };
        let file = sidecars.iter_mut().find(|(name, _)| name == "config.json");
        let Some((_, file)) = file else {
            bail!("{} has gone while it was read", path.display());
        };
        let context =
            |err: Error| err.context(format!("--rope-scaling yarn:{factor}, {}", path.display()));
        let text =
            ModelConfig::json_with_yarn(&String::from_utf8_lossy(file), factor).map_err(context)?;
        let config = ModelConfig::from_json(&text).map_err(context)?;
        if self.lora.is_given() {
            let fields: Value = serde_json::from_str(&text).map_err(Error::wrap)?;
            bail!(
                "--rope-scaling changes the model's config.json, which is not part of an adapter: it would be applied to a model with other frequencies\nhint: copy the model and change the config.json of the copy, which --model is then: \"max_position_embeddings\": {}, \"rope_scaling\": {}",
                fields["max_position_embeddings"],
                fields["rope_scaling"]
            );
        }
        *file = text.into_bytes();
        let tokenizer = sidecars
            .iter_mut()
            .find(|(name, _)| name == "tokenizer_config.json");
        if let Some((_, file)) = tokenizer
            && let Ok(mut fields) = serde_json::from_slice::<Value>(file)
            && fields["model_max_length"]
                .as_f64()
                .is_some_and(|most| most < config.max_seq_len() as f64)
        {
            fields["model_max_length"] = config.max_seq_len().into();
            *file = serde_json::to_vec_pretty(&fields).map_err(Error::wrap)?;
        }
        Ok(config)
    }

    fn title(&self, model: &Path, config: &ModelConfig) -> String {
        let longer = match (self.rope_scaling, config.original_context()) {
            (Some(_), Some(original)) => format!(
                ", its context lengthened from {original} to {} tokens by YaRN",
                config.max_seq_len()
            ),
            _ => String::new(),
        };
        format!("{} on {}{longer}", model.display(), self.data)
    }
}
