//! A run that begins with a checkpoint: `candle-train finetune`.

use std::path::Path;

use candle_core::{Error, Result, bail};
use candle_parallel::checkpoint::sidecar_files;
use candle_train_models::{Family, ModelConfig};
use candle_trainer::Tokenizer;
use candle_trainer::hub::{has_weights, resolve_model, resolve_tokenizer};
use clap::Args;
use serde::{Serialize, Serializer};
use serde_json::Value;
use toml::Table;

use crate::args::data::DataArgs;
use crate::args::lora::LoraArgs;
use crate::args::text::some_text;
use crate::run::Run;
use crate::start::Start;
use crate::start::adapter_base::refuse_adapter;
use crate::start::initial_weights::InitialWeights;
use crate::start::start_model::StartModel;

/// A run that trains a Hugging Face checkpoint, or adapters beside it, on conversations or text.
pub type Finetune = Run<FromCheckpoint>;

/// The weights of a checkpoint.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct FromCheckpoint {
    /// Checkpoint folder, or org/name[@revision] on the Hugging Face hub
    #[arg(long, default_value = "", hide_default_value = true, value_name = "DIR|REPO", long_help = model_help())]
    pub model: String,
    /// Lengthen the model's context to so many times its original one, such as yarn:4: YaRN's rotary frequencies, which the output's config.json names too
    #[arg(long, value_name = "yarn:FACTOR", value_parser = yarn_factor)]
    #[serde(serialize_with = "yarn")]
    pub rope_scaling: Option<f64>,
    /// What is trained beside them, if not these weights themselves.
    #[command(flatten, next_help_heading = "Adapters")]
    pub adapters: LoraArgs,
}

/// The factor of `yarn:FACTOR`.
fn yarn_factor(text: &str) -> std::result::Result<f64, String> {
    let factor = text.strip_prefix("yarn:").and_then(|it| it.parse().ok());
    factor
        .filter(|factor: &f64| factor.is_finite() && *factor > 1.0)
        .ok_or_else(|| "expected yarn:FACTOR with a factor above 1, such as yarn:4".to_string())
}

/// `yarn:FACTOR`
fn yarn<S: Serializer>(
    factor: &Option<f64>,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    some_text(&factor.map(|factor| format!("yarn:{factor}")), serializer)
}

fn model_help() -> String {
    format!(
        "Checkpoint folder, or org/name[@revision] on the Hugging Face hub. Families: {}",
        Family::names()
    )
}

impl Start for FromCheckpoint {
    const COMMAND: &'static str = "finetune";

    fn defaults() -> Table {
        Table::new()
    }

    fn shared(&self) -> Self {
        let mut shared = self.clone();
        shared.model = String::new();
        shared.adapters.adapter = None;
        shared
    }

    fn adapters(&self) -> LoraArgs {
        self.adapters.clone()
    }

    fn longer(&self, config: &ModelConfig, seq_len: usize) -> String {
        let original = config.original_context();
        let original = original.filter(|_| !self.adapters.is_given());
        original.map_or(String::new(), |original| {
            let factor = seq_len.div_ceil(original).max(2);
            format!(", or --rope-scaling yarn:{factor} for a model of longer texts")
        })
    }

    fn model(run: &Finetune, needs_weights: bool) -> Result<StartModel> {
        let named = &run.start.model;
        refuse_adapter(named)?;
        let dir = match needs_weights {
            true => resolve_model(named)?,
            false => resolve_tokenizer(named)?,
        };
        let mut sidecars = sidecar_files(&dir)?;
        let config = run.start.config(&dir, &mut sidecars)?;
        let mut inputs = vec![dir.clone()];
        inputs.extend(run.start.adapters.adapter.clone());
        let weights = match needs_weights || has_weights(named, &dir) {
            true => InitialWeights::Checkpoint(dir.clone()),
            false => InitialWeights::Random,
        };
        Ok(StartModel {
            config,
            dir: Some(dir),
            weights,
            name: Some(named.clone()),
            sidecars,
            inputs,
        })
    }

    fn tokenizer(
        _run: &Finetune,
        model: &mut StartModel,
        _is_first: bool,
    ) -> Result<Option<Tokenizer>> {
        let dir = model.dir.iter().filter(|dir| {
            let has_weights = matches!(model.weights, InitialWeights::Checkpoint(_));
            has_weights || dir.join("tokenizer.json").exists()
        });
        dir.map(Tokenizer::from_dir).next().transpose()
    }

    fn title(&self, data: &DataArgs, model: &StartModel) -> String {
        let dir = model.dir.as_deref().unwrap_or(Path::new("")).display();
        format!("{dir} on {data}{}", self.longer_context(&model.config))
    }
}

impl FromCheckpoint {
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
        if self.adapters.is_given() {
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

    /// How its context is lengthened, in words.
    fn longer_context(&self, config: &ModelConfig) -> String {
        match (self.rope_scaling, config.original_context()) {
            (Some(_), Some(original)) => format!(
                ", its context lengthened from {original} to {} tokens by YaRN",
                config.max_seq_len()
            ),
            _ => String::new(),
        }
    }
}
