//! `rope_scaling` of transformers 4, `rope_parameters` of 5.

use candle_core::{Error, Result, bail};
use serde::Deserialize;
use serde_json::Value;

use crate::rope_kind::{RopeKind, yarn_attention_factor};

#[derive(Deserialize)]
#[serde(expecting = "an object")]
pub(crate) struct RopeFields {
    rope_type: Option<String>,
    r#type: Option<String>,
    pub rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
    attention_factor: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    truncate: Option<bool>,
    mrope_section: Option<Value>,
    full_attention: Option<Value>,
    sliding_attention: Option<Value>,
}

impl RopeFields {
    /// The kind that these fields of `field` describe. `original` is the length of the original context that the file gives outside
    /// them, which wins; where neither gives one it is `max_positions`.
    pub fn kind(
        &self,
        field: &str,
        original: Option<f64>,
        max_positions: usize,
    ) -> Result<RopeKind> {
        if let Some(factor) = self.partial_rotary_factor.filter(|factor| *factor != 1.0) {
            bail!("{field}.partial_rotary_factor is {factor}; supported: 1");
        }
        for (name, value) in [
            ("mrope_section", &self.mrope_section),
            ("full_attention", &self.full_attention),
            ("sliding_attention", &self.sliding_attention),
        ] {
            if let Some(value) = value {
                bail!(
                    "{field}.{name} is {value}; supported: one rope_type for all layers and dims"
                );
            }
        }
        let number = |name: &str, number: Option<f64>| {
            number.ok_or_else(|| Error::msg(format!("{field} has no {name}; expected a number")))
        };
        let original = original.or(self.original_max_position_embeddings);
        let original = original.map_or(max_positions, |tokens| tokens as usize);
        let kind = self.rope_type.as_deref().or(self.r#type.as_deref());
        match kind.unwrap_or("default") {
            "default" => Ok(RopeKind::Default),
            "linear" => Ok(RopeKind::Linear {
                factor: number("factor", self.factor)?,
            }),
            "dynamic" => Ok(RopeKind::Dynamic {
                factor: number("factor", self.factor)?,
            }),
            "llama3" => Ok(RopeKind::Llama3 {
                factor: number("factor", self.factor)?,
                low_freq_factor: number("low_freq_factor", self.low_freq_factor)?,
                high_freq_factor: number("high_freq_factor", self.high_freq_factor)?,
                original_max_position_embeddings: original,
            }),
            "yarn" => Ok(self.yarn(original, max_positions)),
            other => bail!(
                "{field}.rope_type is {other:?}; supported: \"default\", \"linear\", \"dynamic\", \"llama3\", \"yarn\""
            ),
        }
    }

    fn yarn(&self, original_max_position_embeddings: usize, max_positions: usize) -> RopeKind {
        // 0 counts as absent.
        let given = |number: Option<f64>| number.filter(|number| *number != 0.0);
        let longer = max_positions as f64 / original_max_position_embeddings as f64;
        let factor = self.factor.unwrap_or(longer);
        let scale = |mscale: f64| yarn_attention_factor(factor, mscale);
        let attention_factor = match (given(self.mscale), given(self.mscale_all_dim)) {
            (Some(mscale), Some(all_dim)) => scale(mscale) / scale(all_dim),
            _ => scale(1.0),
        };
        RopeKind::Yarn {
            factor,
            original_max_position_embeddings,
            attention_factor: self.attention_factor.unwrap_or(attention_factor),
            beta_fast: given(self.beta_fast).unwrap_or(32.0),
            beta_slow: given(self.beta_slow).unwrap_or(1.0),
            truncate: self.truncate.unwrap_or(true),
        }
    }
}
