//! The families, by the `model_type` of `config.json`.

use std::fmt;

use candle_core::{Result, bail};
use serde_json::Value;

use crate::config::ModelConfig;
use crate::config_file::ConfigFile;
use crate::gemma::GEMMA;
use crate::llama::LLAMA;
use crate::mistral::MISTRAL;
use crate::qwen2::QWEN2;
use crate::qwen3::QWEN3;

/// Every family there is.
pub static FAMILIES: &[&Family] = &[&LLAMA, &MISTRAL, &QWEN2, &QWEN3, &GEMMA];

/// What `config.json` says in one family otherwise than in another. What that means for the computation is in [`ModelConfig`].
pub struct Family {
    /// The family's `model_type`.
    pub model_type: &'static str,
    /// Its class in `transformers`.
    pub architecture: &'static str,
    /// The fields with a default of its own and those that not every family reads, with their values where the file has none.
    pub(crate) defaults: fn() -> Value,
    /// What these fields mean; the configuration has everything else already.
    pub(crate) read: fn(&ConfigFile, &mut ModelConfig) -> Result<()>,
    /// These fields, as [`Self::read`] reads them.
    pub(crate) write: fn(&ModelConfig) -> Value,
}

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

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.model_type)
    }
}

/// There is one family of a `model_type`.
impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.model_type == other.model_type
    }
}
