//! The families, by the `model_type` of `config.json`, and the configurations that are read by them.

use std::path::Path;

use candle_core::{Result, bail};
use candle_parallel::checkpoint::read_text_file;

use crate::config::ModelConfig;
use crate::config_file::ConfigFile;
use crate::family::Family;
use crate::gemma::GEMMA;
use crate::llama::LLAMA;
use crate::mistral::MISTRAL;
use crate::qwen2::QWEN2;
use crate::qwen3::QWEN3;

/// Every family there is.
pub static FAMILIES: &[&Family] = &[&LLAMA, &MISTRAL, &QWEN2, &QWEN3, &GEMMA];

impl Family {
    /// The family of a configuration that names `model_type`, or only its class.
    pub(crate) fn find(
        model_type: Option<&str>,
        architectures: &[String],
    ) -> Result<&'static Self> {
        let is_found = |family: &&&Self| match (model_type, architectures) {
            (Some(name), _) => name == family.model_type,
            (None, names) => names.iter().any(|name| name == family.architecture),
        };
        let Some(family) = FAMILIES.iter().find(is_found) else {
            let got = match (model_type, architectures) {
                (Some(name), _) => format!("model_type is {name:?}"),
                (None, []) => "neither model_type nor architectures is given".to_string(),
                (None, names) => format!("architectures is {names:?} and there is no model_type"),
            };
            bail!("{got}; supported: model_type {}", Self::names());
        };
        if let Some(other) = architectures
            .iter()
            .find(|name| *name != family.architecture)
        {
            bail!(
                "architectures names {other:?}; supported for model_type {:?}: {:?}",
                family.model_type,
                family.architecture
            );
        }
        Ok(family)
    }

    /// Every `model_type` there is, in words.
    pub fn names() -> String {
        let names = FAMILIES
            .iter()
            .map(|family| format!("{:?}", family.model_type));
        names.collect::<Vec<_>>().join(", ")
    }
}

impl ModelConfig {
    /// Reads a `config.json` in the spelling of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`).
    ///
    /// What this crate does not implement is an error that names the field, its value and what is supported.
    ///
    /// # Errors
    /// A file that cannot be read, a field that is missing or of another type, and what this crate does not implement.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let text = read_text_file(path).map_err(|err| {
            candle_core::Error::msg(format!("cannot read {}: {err}", path.display()))
        })?;
        Self::from_json(&text).map_err(|err| err.context(path.display().to_string()))
    }

    /// Like [`Self::from_file`], from the file's text.
    ///
    /// # Errors
    /// As for [`Self::from_file`].
    pub fn from_json(text: &str) -> Result<Self> {
        let config = ConfigFile::read(text, Family::find)?;
        config.validate()?;
        Ok(config)
    }

    /// The text of a `config.json` whose model reads texts `factor` times as long as `text` says, by YaRN: `rope_scaling` and
    /// `rope_parameters` name it, and `max_position_embeddings` is the longer length, which some versions of `transformers` divide by the original
    /// one instead of reading the factor. Where `text` names YaRN already, its other fields stay, and the factor is of its original context.
    ///
    /// # Errors
    /// What [`Self::from_json`] refuses, frequencies that are scaled in another way, and a factor that makes the context no longer, or shorter than YaRN
    /// has made it already.
    pub fn json_with_yarn(text: &str, factor: f64) -> Result<String> {
        let text = ConfigFile::with_yarn(text, &Self::from_json(text)?, factor)?;
        Self::from_json(&text).map(|_| text)
    }

    /// The text of a `config.json` that `transformers` reads.
    ///
    /// # Errors
    /// A configuration that the family's `config.json` has no words for.
    pub fn to_json(&self) -> Result<String> {
        let text = ConfigFile::text_of(self)?;
        let read = Self::from_json(&text)?;
        let same_windows = |config: &Self| {
            let windows = (0..config.num_hidden_layers).map(|index| config.window(index));
            Self {
                windows: windows.collect(),
                ..config.clone()
            }
        };
        if same_windows(&read) != same_windows(self) {
            let family = self.family.model_type;
            bail!(
                "a config.json of model_type {family:?} cannot say {self:?}: it would be read as {read:?}"
            );
        }
        Ok(text)
    }
}
