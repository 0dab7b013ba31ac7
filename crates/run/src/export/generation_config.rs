//! What `generation_config.json` says of how a model's texts are made, read as transformers does.

use std::path::Path;

use candle_core::{Result, bail};
use candle_parallel::checkpoint::read_file;
use candle_train_models::ModelConfig;
use serde_json::Value;

/// The file.
pub const GENERATION_FILE: &str = "generation_config.json";

/// Tokens that transformers samples from where nothing says.
const TOP_K: usize = 50;

/// What a model's file asks for; `None` where it says nothing.
#[derive(Debug, Default, PartialEq)]
pub struct GenerationFile {
    /// Whether tokens are drawn at random.
    pub do_sample: bool,
    /// Randomness.
    pub temperature: Option<f64>,
    /// So many most likely tokens.
    pub top_k: Option<usize>,
    /// The most likely tokens with this probability.
    pub top_p: Option<f64>,
    /// What makes tokens less likely that were there.
    pub repetition_penalty: Option<f64>,
    /// Tokens that end a text.
    pub eos_ids: Vec<u32>,
}

impl GenerationFile {
    /// That of the model in `dir`, or of its adapter, which has one if it was trained with another template than the
    /// model's; one that says nothing if there is none.
    ///
    /// # Errors
    /// A file that cannot be read, or is no JSON.
    pub fn read(dir: &Path, adapter: Option<&Path>) -> Result<Self> {
        let of_adapter = adapter.map(|dir| dir.join(GENERATION_FILE));
        let of_adapter = of_adapter.filter(|path| path.is_file());
        let path = of_adapter.unwrap_or_else(|| dir.join(GENERATION_FILE));
        let text = match read_file(&path) {
            Ok(text) => text,
            Err(err) if err.kind() == std::io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(err) => bail!("cannot read {}: {err}", path.display()),
        };
        let file: Value = match serde_json::from_slice(&text) {
            Ok(value) => value,
            Err(err) => bail!("{} is not valid JSON: {err}", path.display()),
        };
        let ends = &file["eos_token_id"];
        let ends = ends
            .as_array()
            .map_or(std::slice::from_ref(ends), Vec::as_slice);
        let ends = ends.iter().filter_map(Value::as_u64);
        let positive = |name: &str| file[name].as_f64().filter(|value| *value > 0.0);
        Ok(Self {
            do_sample: file["do_sample"] == true,
            temperature: file["temperature"].as_f64().filter(|value| *value >= 0.0),
            // null is another word for all.
            top_k: file.get("top_k").map(|k| k.as_u64().unwrap_or(0) as usize),
            top_p: positive("top_p").filter(|p| *p <= 1.0),
            repetition_penalty: positive("repetition_penalty"),
            eos_ids: ends.filter_map(|id| u32::try_from(id).ok()).collect(),
        })
    }

    /// The temperature if no flag says: 0 unless tokens are drawn.
    pub fn temperature(&self) -> f64 {
        match self.do_sample {
            true => self.temperature.unwrap_or(1.0),
            false => 0.0,
        }
    }

    /// Tokens that end a text of a model with this configuration.
    pub fn eos_ids<'a>(&'a self, config: &'a ModelConfig) -> &'a [u32] {
        match self.eos_ids.as_slice() {
            [] => &config.eos_token_ids,
            ids => ids,
        }
    }

    /// Tokens to draw from if no flag says; 0: all.
    pub fn top_k(&self) -> usize {
        self.top_k.unwrap_or(TOP_K)
    }
}
