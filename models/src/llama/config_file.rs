//! `config.json` as it is found in the wild.

use candle_core::{Result, bail};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::config::{LlamaConfig, RopeKind};

/// The fields of `config.json` that say something about the computation. Others are ignored, as `transformers` does.
#[derive(Deserialize)]
pub(super) struct ConfigFile {
    model_type: Option<String>,
    architectures: Option<Vec<String>>,
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
    rope_scaling: Option<Map<String, Value>>,
    rope_parameters: Option<Map<String, Value>>,
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
    eos_token_id: Option<TokenIds>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TokenIds {
    One(u32),
    Many(Vec<u32>),
}

impl ConfigFile {
    pub fn parse(text: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(text)
            .map_err(|err| candle_core::Error::msg(format!("not a JSON file: {err}")))?;
        let model_type = value.get("model_type").and_then(Value::as_str);
        if let Some(other) = model_type.filter(|model_type| *model_type != "llama") {
            bail!("model_type is {other:?}; supported: \"llama\"");
        }
        serde_json::from_value(value)
            .map_err(|err| candle_core::Error::msg(format!("not a Llama configuration: {err}")))
    }

    pub fn into_config(self) -> Result<LlamaConfig> {
        self.check_supported()?;
        let (rope_theta, rope) = self.rope()?;
        if self.num_attention_heads == 0 {
            bail!("num_attention_heads is 0; expected at least 1");
        }
        let head_dim = match self.head_dim {
            Some(head_dim) => head_dim,
            None if self.hidden_size.is_multiple_of(self.num_attention_heads) => {
                self.hidden_size / self.num_attention_heads
            }
            None => bail!(
                "hidden_size({}) is not a multiple of num_attention_heads({}) and there is no head_dim",
                self.hidden_size,
                self.num_attention_heads
            ),
        };
        Ok(LlamaConfig {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            num_hidden_layers: self.num_hidden_layers,
            num_attention_heads: self.num_attention_heads,
            num_key_value_heads: self.num_key_value_heads.unwrap_or(self.num_attention_heads),
            head_dim,
            rms_norm_eps: self.rms_norm_eps.unwrap_or(1e-6),
            rope_theta,
            rope,
            max_position_embeddings: self.max_position_embeddings.unwrap_or(2048),
            tie_word_embeddings: self.tie_word_embeddings.unwrap_or(false),
            attention_bias: self.attention_bias.unwrap_or(false),
            mlp_bias: self.mlp_bias.unwrap_or(false),
            bos_token_id: self.bos_token_id,
            eos_token_ids: match self.eos_token_id {
                None => Vec::new(),
                Some(TokenIds::One(id)) => vec![id],
                Some(TokenIds::Many(ids)) => ids,
            },
        })
    }

    fn check_supported(&self) -> Result<()> {
        let architectures = self.architectures.as_deref().unwrap_or_default();
        if self.model_type.is_none() && architectures.is_empty() {
            bail!("neither model_type nor architectures is given; supported: model_type \"llama\"");
        }
        if let Some(other) = architectures
            .iter()
            .find(|name| *name != "LlamaForCausalLM")
        {
            bail!("architectures names {other:?}; supported: \"LlamaForCausalLM\"");
        }
        if let Some(act) = self
            .hidden_act
            .as_deref()
            .filter(|act| !matches!(*act, "silu" | "swish"))
        {
            bail!("hidden_act is {act:?}; supported: \"silu\"");
        }
        if let Some(dropout) = self.attention_dropout.filter(|dropout| *dropout != 0.0) {
            bail!("attention_dropout is {dropout}; supported: 0");
        }
        if let Some(factor) = self.partial_rotary_factor.filter(|factor| *factor != 1.0) {
            bail!("partial_rotary_factor is {factor}; supported: 1");
        }
        if let Some(config) = self
            .quantization_config
            .as_ref()
            .filter(|config| !config.is_null())
        {
            let method = config.get("quant_method").unwrap_or(config);
            bail!("quantization_config is {method}; supported: weights that are not quantised");
        }
        for (field, dtype) in [("dtype", &self.dtype), ("torch_dtype", &self.torch_dtype)] {
            let name = dtype.as_ref().and_then(Value::as_str);
            let is_known =
                |name: &&str| matches!(*name, "float32" | "float16" | "bfloat16" | "auto");
            if let Some(other) = name.filter(|name| !is_known(name)) {
                bail!("{field} is {other:?}; supported: \"float32\", \"float16\", \"bfloat16\"");
            }
        }
        Ok(())
    }

    fn rope(&self) -> Result<(f64, RopeKind)> {
        let (field, parameters) = match (&self.rope_parameters, &self.rope_scaling) {
            (Some(parameters), _) => ("rope_parameters", Some(parameters)),
            (None, scaling) => ("rope_scaling", scaling.as_ref()),
        };
        let default_theta = self.rope_theta.unwrap_or(10000.0);
        let Some(parameters) = parameters else {
            return Ok((default_theta, RopeKind::Default));
        };
        let number = |name: &str| -> Result<f64> {
            match parameters.get(name).map(|value| (value, value.as_f64())) {
                Some((_, Some(number))) => Ok(number),
                Some((value, None)) => bail!("{field}.{name} is {value}; expected a number"),
                None => bail!("{field} has no {name}; expected a number"),
            }
        };
        let theta = match parameters.contains_key("rope_theta") {
            true => number("rope_theta")?,
            false => default_theta,
        };
        if let Some(factor) = parameters
            .get("partial_rotary_factor")
            .filter(|f| f.as_f64() != Some(1.0))
        {
            bail!("{field}.partial_rotary_factor is {factor}; supported: 1");
        }
        let kind = parameters
            .get("rope_type")
            .or_else(|| parameters.get("type"));
        let kind = match kind {
            None => "default",
            Some(Value::String(kind)) => kind,
            Some(other) => bail!("{field}.rope_type is {other}; expected a name"),
        };
        let rope = match kind {
            "default" => RopeKind::Default,
            "linear" => RopeKind::Linear {
                factor: number("factor")?,
            },
            "llama3" => RopeKind::Llama3 {
                factor: number("factor")?,
                low_freq_factor: number("low_freq_factor")?,
                high_freq_factor: number("high_freq_factor")?,
                original_max_position_embeddings: number("original_max_position_embeddings")?
                    as usize,
            },
            other => bail!(
                "{field}.rope_type is {other:?}; supported: \"default\", \"linear\", \"llama3\""
            ),
        };
        Ok((theta, rope))
    }

    pub fn text_of(config: &LlamaConfig) -> Result<String> {
        let theta = config.rope_theta;
        let rope = match config.rope {
            RopeKind::Default => json!({ "rope_type": "default", "rope_theta": theta }),
            RopeKind::Linear { factor } => {
                json!({ "rope_type": "linear", "rope_theta": theta, "factor": factor })
            }
            RopeKind::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => json!({
                "rope_type": "llama3",
                "rope_theta": theta,
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_max_position_embeddings,
            }),
        };
        let eos = match config.eos_token_ids.as_slice() {
            [] => Value::Null,
            [id] => json!(id),
            ids => json!(ids),
        };
        let scaling = match config.rope {
            RopeKind::Default => Value::Null,
            _ => rope.clone(),
        };
        // Both spellings, so that readers of either generation find theirs.
        let value = json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": config.attention_bias,
            "attention_dropout": 0.0,
            "bos_token_id": config.bos_token_id,
            "eos_token_id": eos,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "max_position_embeddings": config.max_position_embeddings,
            "mlp_bias": config.mlp_bias,
            "num_attention_heads": config.num_attention_heads,
            "num_hidden_layers": config.num_hidden_layers,
            "num_key_value_heads": config.num_key_value_heads,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_parameters": rope,
            "rope_scaling": scaling,
            "rope_theta": theta,
            "tie_word_embeddings": config.tie_word_embeddings,
            "vocab_size": config.vocab_size,
        });
        serde_json::to_string_pretty(&value).map_err(candle_core::Error::msg)
    }
}
