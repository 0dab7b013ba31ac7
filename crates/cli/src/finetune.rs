//! `candle-train finetune`

use std::path::PathBuf;
use std::process::ExitCode;

use candle_core::Result;
use candle_parallel::checkpoint::sidecar_files;
use candle_train::Tokenizer;
use candle_train::hub::resolve_model;
use candle_train_models::{Family, ModelConfig};
use clap::Parser;

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
        let config = ModelConfig::from_file(model.join("config.json"))?;
        let taken = training.fill(&flags, Some(&config), &ranks);
        training.validate_filled()?;
        training.check_model(&config)?;
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
            title: format!("{} on {}", model.display(), self.data),
            sidecars: sidecar_files(&model)?,
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
