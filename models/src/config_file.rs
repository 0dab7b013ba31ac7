//! `config.json` as it is found in the wild.

use candle_core::{Error, Result, bail};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::config::{ModelConfig, RopeKind};

/// The fields of `config.json` that say something about the computation. Others are ignored and `null` counts as absent, as in
/// `transformers`.
#[derive(Deserialize)]
pub(crate) struct ConfigFile {
    model_type: Option<String>,
    #[serde(default)]
    architectures: Vec<String>,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    hidden_act: Option<String>,
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RopeFields>,
    rope_parameters: Option<RopeFields>,
    partial_rotary_factor: Option<f64>,
    max_position_embeddings: Option<usize>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    attention_dropout: Option<f64>,
    quantization_config: Option<Value>,
    dtype: Option<Value>,
    torch_dtype: Option<Value>,
    bos_token_id: Option<u32>,
    #[serde(default)]
    eos_token_id: Vec<u32>,
}

/// `rope_scaling` of transformers 4, `rope_parameters` of 5.
#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct RopeFields {
    rope_type: Option<String>,
    r#type: Option<String>,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
}

impl ConfigFile {
    pub fn parse(text: &str) -> Result<Self> {
        let mut value: Value = serde_json::from_str(text)
            .map_err(|err| Error::msg(format!("not a JSON file: {err}")))?;
        let Value::Object(fields) = &mut value else {
            bail!("not a Llama configuration: expected a JSON object");
        };
        fields.retain(|_, value| !value.is_null());
        let model_type = fields.get("model_type").and_then(Value::as_str);
        if let Some(other) = model_type.filter(|model_type| *model_type != "llama") {
            bail!("model_type is {other:?}; supported: \"llama\"");
        }
        if fields.get("rope_scaling").is_some_and(|v| *v == json!({})) {
            fields.remove("rope_scaling");
        }
        // One id or a list of them.
        if let Some(id) = fields.get_mut("eos_token_id").filter(|ids| !ids.is_array()) {
            *id = json!([id.take()]);
        }
        serde_path_to_error::deserialize(value).map_err(Error::msg)
    }

    pub fn into_config(self) -> Result<ModelConfig> {
        self.check_supported()?;
        let (rope_theta, rope) = self.rope()?;
        let (hidden_size, num_heads) = (self.hidden_size, self.num_attention_heads);
        let head_dim = match (self.head_dim, hidden_size.checked_rem(num_heads)) {
            (_, None) => bail!("num_attention_heads is 0; expected at least 1"),
            (Some(head_dim), _) => head_dim,
            (None, Some(0)) => hidden_size / num_heads,
            (None, Some(_)) => bail!(
                "hidden_size({hidden_size}) is not a multiple of num_attention_heads({num_heads}) and there is no head_dim"
            ),
        };
        Ok(ModelConfig {
            vocab_size: self.vocab_size,
            hidden_size,
            intermediate_size: self.intermediate_size,
            num_hidden_layers: self.num_hidden_layers,
            num_attention_heads: num_heads,
            num_key_value_heads: self.num_key_value_heads.unwrap_or(num_heads),
            head_dim,
            rms_norm_eps: self.rms_norm_eps.unwrap_or(1e-6),
            rope_theta,
            rope,
            max_position_embeddings: self.max_position_embeddings.unwrap_or(2048),
            tie_word_embeddings: self.tie_word_embeddings.unwrap_or(false),
            attention_bias: self.attention_bias.unwrap_or(false),
            mlp_bias: self.mlp_bias.unwrap_or(false),
            bos_token_id: self.bos_token_id,
            eos_token_ids: self.eos_token_id,
        })
    }

    fn check_supported(&self) -> Result<()> {
        if self.model_type.is_none() && self.architectures.is_empty() {
            bail!("neither model_type nor architectures is given; supported: model_type \"llama\"");
        }
        let mut names = self.architectures.iter();
        if let Some(other) = names.find(|name| *name != "LlamaForCausalLM") {
            bail!("architectures names {other:?}; supported: \"LlamaForCausalLM\"");
        }
        if let Some(act) = self.hidden_act.as_deref()
            && !matches!(act, "silu" | "swish")
        {
            bail!("hidden_act is {act:?}; supported: \"silu\"");
        }
        if let Some(dropout) = self.attention_dropout.filter(|dropout| *dropout != 0.0) {
            bail!("attention_dropout is {dropout}; supported: 0");
        }
        if let Some(factor) = self.partial_rotary_factor.filter(|factor| *factor != 1.0) {
            bail!("partial_rotary_factor is {factor}; supported: 1");
        }
        if let Some(config) = &self.quantization_config {
            let method = config.get("quant_method").unwrap_or(config);
            bail!("quantization_config is {method}; supported: weights that are not quantised");
        }
        for (field, dtype) in [("dtype", &self.dtype), ("torch_dtype", &self.torch_dtype)] {
            let name = dtype.as_ref().and_then(Value::as_str);
            if let Some(other) = name
                && !matches!(other, "float32" | "float16" | "bfloat16" | "auto")
            {
                bail!("{field} is {other:?}; supported: \"float32\", \"float16\", \"bfloat16\"");
            }
        }
        Ok(())
    }

    /// As `transformers` does: the older `rope_scaling` wins. The base is the chosen object's own, else that of
    /// `rope_parameters`, else that of the file.
    fn rope(&self) -> Result<(f64, RopeKind)> {
        let scaling = self.rope_scaling.as_ref();
        let parameters = self.rope_parameters.as_ref();
        let theta = [scaling, parameters].into_iter().flatten();
        let theta = theta.filter_map(|rope| rope.rope_theta).next();
        let theta = theta.or(self.rope_theta).unwrap_or(10000.0);
        let kind = match (scaling, parameters) {
            (Some(rope), _) => rope.kind("rope_scaling")?,
            (None, Some(rope)) => rope.kind("rope_parameters")?,
            (None, None) => RopeKind::Default,
        };
        Ok((theta, kind))
    }

    pub fn text_of(config: &ModelConfig) -> Result<String> {
        let write = || {
            let mut file = serde_json::to_value(config)?;
            let mut rope = serde_json::to_value(config.rope)?;
            rope["rope_theta"] = json!(config.rope_theta);
            // Both spellings, so that readers of either generation find theirs.
            file["rope_scaling"] = match config.rope {
                RopeKind::Default => Value::Null,
                _ => rope.clone(),
            };
            file["rope_parameters"] = rope;
            file["eos_token_id"] = match config.eos_token_ids.as_slice() {
                [] => Value::Null,
                [id] => json!(id),
                ids => json!(ids),
            };
            file["model_type"] = json!("llama");
            file["architectures"] = json!(["LlamaForCausalLM"]);
            file["hidden_act"] = json!("silu");
            file["attention_dropout"] = json!(0.0);
            serde_json::to_string_pretty(&file)
        };
        write().map_err(Error::msg)
    }
}

impl RopeFields {
    fn kind(&self, field: &str) -> Result<RopeKind> {
        if let Some(factor) = self.partial_rotary_factor.filter(|factor| *factor != 1.0) {
            bail!("{field}.partial_rotary_factor is {factor}; supported: 1");
        }
        let number = |name: &str, number: Option<f64>| {
            number.ok_or_else(|| Error::msg(format!("{field} has no {name}; expected a number")))
        };
        let kind = self.rope_type.as_deref().or(self.r#type.as_deref());
        match kind.unwrap_or("default") {
            "default" => Ok(RopeKind::Default),
            "linear" => Ok(RopeKind::Linear {
                factor: number("factor", self.factor)?,
            }),
            "llama3" => Ok(RopeKind::Llama3 {
                factor: number("factor", self.factor)?,
                low_freq_factor: number("low_freq_factor", self.low_freq_factor)?,
                high_freq_factor: number("high_freq_factor", self.high_freq_factor)?,
                original_max_position_embeddings: number(
                    "original_max_position_embeddings",
                    self.original_max_position_embeddings,
                )? as usize,
            }),
            other => bail!(
                "{field}.rope_type is {other:?}; supported: \"default\", \"linear\", \"llama3\""
            ),
        }
    }
}
