//! The hyper-parameters of a model.

use std::path::Path;

use candle_core::{Result, bail};
use serde::Serialize;

use crate::config_file::ConfigFile;

/// Largest of most sizes.
const MAX_SIZE: usize = 1 << 31;
/// Largest width of a head.
const MAX_HEAD_DIM: usize = 1 << 16;
/// Most decoder layers.
const MAX_LAYERS: usize = 1 << 16;
/// Most values in all weights: their bytes, in any type, are a number that 64 bits hold.
const MAX_VALUES: u128 = 1 << 48;

/// Everything about a model that is not a weight.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelConfig {
    /// Number of tokens.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key/value heads.
    pub num_key_value_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// ε of the RMS norms.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// How the rotary frequencies are scaled.
    #[serde(skip)]
    pub rope: RopeKind,
    /// Longest sequence.
    pub max_position_embeddings: usize,
    /// Whether the head uses the embedding's weight.
    pub tie_word_embeddings: bool,
    /// Whether q, k, v and o have a bias.
    pub attention_bias: bool,
    /// Whether gate, up and down have a bias.
    pub mlp_bias: bool,
    /// First token of a text, if the model has one.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a text.
    #[serde(skip)]
    pub eos_token_ids: Vec<u32>,
}

/// Scaling of the rotary frequencies, by its name in config.json.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum RopeKind {
    /// None.
    Default,
    /// All frequencies divided by `factor`.
    Linear {
        /// How many times longer the context is.
        factor: f64,
    },
    /// Low frequencies divided by `factor`, high ones kept, those between interpolated.
    Llama3 {
        /// How many times longer the context is.
        factor: f64,
        /// The original context divided by this is the shortest wavelength that is fully scaled.
        low_freq_factor: f64,
        /// The original context divided by this is the longest wavelength that is kept.
        high_freq_factor: f64,
        /// Context length before scaling.
        original_max_position_embeddings: usize,
    },
}

impl ModelConfig {
    /// Reads a `config.json` in the spelling of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`).
    ///
    /// What this crate does not implement is an error that names the field, its value and what is supported.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path).map_err(|err| {
            candle_core::Error::msg(format!("cannot read {}: {err}", path.display()))
        })?;
        Self::from_json(&text).map_err(|err| err.context(path.display().to_string()))
    }

    /// Like [`Self::from_file`], from the file's text.
    pub fn from_json(text: &str) -> Result<Self> {
        let config = ConfigFile::parse(text)?.into_config()?;
        config.validate()?;
        Ok(config)
    }

    /// The text of a `config.json` that `transformers` reads.
    pub fn to_json(&self) -> Result<String> {
        ConfigFile::text_of(self)
    }

    /// An error with names and numbers if the sizes are out of range or do not fit each other.
    pub fn validate(&self) -> Result<()> {
        self.check_ranges()?;
        if !self
            .num_attention_heads
            .is_multiple_of(self.num_key_value_heads)
        {
            bail!(
                "num_attention_heads({}) is not a multiple of num_key_value_heads({})",
                self.num_attention_heads,
                self.num_key_value_heads
            );
        }
        if !self.head_dim.is_multiple_of(2) {
            bail!(
                "head_dim is {}; expected an even number, as rotary embeddings turn pairs",
                self.head_dim
            );
        }
        self.check_num_values()?;
        self.check_rope()?;
        if !(self.rms_norm_eps >= 0.0 && self.rms_norm_eps.is_finite()) {
            bail!(
                "rms_norm_eps is {}; expected a number >= 0",
                self.rms_norm_eps
            );
        }
        Ok(())
    }

    fn check_ranges(&self) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab_size, MAX_SIZE),
            ("hidden_size", self.hidden_size, MAX_SIZE),
            ("intermediate_size", self.intermediate_size, MAX_SIZE),
            ("num_hidden_layers", self.num_hidden_layers, MAX_LAYERS),
            ("num_attention_heads", self.num_attention_heads, MAX_SIZE),
            ("num_key_value_heads", self.num_key_value_heads, MAX_SIZE),
            ("head_dim", self.head_dim, MAX_HEAD_DIM),
            (
                "max_position_embeddings",
                self.max_position_embeddings,
                MAX_SIZE,
            ),
        ];
        for (name, size, max) in sizes {
            if size == 0 {
                bail!("{name} is 0; expected at least 1");
            }
            if size > max {
                bail!("{name} is {size}; expected at most {max}");
            }
        }
        Ok(())
    }

    /// Bounds the number of values in all weights, and so every product of sizes.
    fn check_num_values(&self) -> Result<()> {
        let [
            vocab,
            hidden,
            intermediate,
            layers,
            heads,
            kv_heads,
            head_dim,
        ] = [
            self.vocab_size,
            self.hidden_size,
            self.intermediate_size,
            self.num_hidden_layers,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
        ]
        .map(|size| size as u128);
        // Within their ranges these are far from the end of 128 bits.
        let attention = 2 * hidden * head_dim * (heads + kv_heads);
        let num_values = 2 * vocab * hidden + layers * (attention + 3 * hidden * intermediate);
        if num_values > MAX_VALUES {
            bail!(
                "the weights would have {num_values} values; expected at most {MAX_VALUES} (vocab_size({vocab}), hidden_size({hidden}), intermediate_size({intermediate}), num_hidden_layers({layers}), num_attention_heads({heads}), num_key_value_heads({kv_heads}), head_dim({head_dim}))"
            );
        }
        Ok(())
    }

    fn check_rope(&self) -> Result<()> {
        let factors = match self.rope {
            RopeKind::Default => vec![],
            RopeKind::Linear { factor } => vec![("factor", factor)],
            RopeKind::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                if low_freq_factor == high_freq_factor {
                    bail!(
                        "rope low_freq_factor and high_freq_factor are both {low_freq_factor}; expected two numbers"
                    );
                }
                vec![
                    ("factor", factor),
                    ("low_freq_factor", low_freq_factor),
                    ("high_freq_factor", high_freq_factor),
                    (
                        "original_max_position_embeddings",
                        original_max_position_embeddings as f64,
                    ),
                ]
            }
        };
        for (name, value) in factors.into_iter().chain([("rope_theta", self.rope_theta)]) {
            if !(value > 0.0 && value.is_finite()) {
                bail!("rope {name} is {value}; expected a positive number");
            }
        }
        Ok(())
    }
}
