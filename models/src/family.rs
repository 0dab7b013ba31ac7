//! What sets a family apart.

use std::fmt;

use candle_core::Result;
use serde_json::Value;

use crate::config::ModelConfig;
use crate::config_file::ConfigFile;

/// What `config.json` says in one family otherwise than in another. What that means for the computation is in [`ModelConfig`].
pub struct Family {
    /// The family's `model_type`.
    pub model_type: &'static str,
    /// Its class in `transformers`.
    pub architecture: &'static str,
    /// Its architecture in llama.cpp, and so in GGUF files.
    pub gguf_architecture: &'static str,
    /// The fields with a default of its own and those that not every family reads, with their values where the file has none.
    pub(crate) defaults: fn() -> Value,
    /// What these fields mean; the configuration has everything else already.
    pub(crate) read: fn(&ConfigFile, &mut ModelConfig) -> Result<()>,
    /// These fields, as [`Self::read`] reads them.
    pub(crate) write: fn(&ModelConfig) -> Value,
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
