//! `config.json` as it is found in the wild.

use candle_core::{Result, bail};
use serde_json::{Map, Value, json};

use super::config::{LlamaConfig, RopeKind};
use super::config_fields::ConfigFields;

/// The fields of `config.json` that say something about the computation. Others are ignored, as `transformers` does.
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
    eos_token_ids: Vec<u32>,
}

impl ConfigFile {
    pub fn parse(text: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(text)
            .map_err(|err| candle_core::Error::msg(format!("not a JSON file: {err}")))?;
        let model_type = value.get("model_type").and_then(Value::as_str);
        if let Some(other) = model_type.filter(|model_type| *model_type != "llama") {
            bail!("model_type is {other:?}; supported: \"llama\"");
        }
        let Value::Object(fields) = value else {
            bail!("not a Llama configuration: expected a JSON object");
        };
        Self::from_fields(&ConfigFields::new(fields))
    }

    fn from_fields(fields: &ConfigFields) -> Result<Self> {
        Ok(Self {
            model_type: fields.text("model_type")?,
            architectures: fields.texts("architectures")?,
            vocab_size: fields.required_size("vocab_size")?,
            hidden_size: fields.required_size("hidden_size")?,
            intermediate_size: fields.required_size("intermediate_size")?,
            num_hidden_layers: fields.required_size("num_hidden_layers")?,
            num_attention_heads: fields.required_size("num_attention_heads")?,
            num_key_value_heads: fields.size("num_key_value_heads")?,
            head_dim: fields.size("head_dim")?,
            hidden_act: fields.text("hidden_act")?,
            rms_norm_eps: fields.number("rms_norm_eps")?,
            rope_theta: fields.number("rope_theta")?,
            rope_scaling: fields.object("rope_scaling")?,
            rope_parameters: fields.object("rope_parameters")?,
            partial_rotary_factor: fields.number("partial_rotary_factor")?,
            max_position_embeddings: fields.size("max_position_embeddings")?,
            tie_word_embeddings: fields.flag("tie_word_embeddings")?,
            attention_bias: fields.flag("attention_bias")?,
            mlp_bias: fields.flag("mlp_bias")?,
            attention_dropout: fields.number("attention_dropout")?,
            quantization_config: fields.value("quantization_config").cloned(),
            dtype: fields.value("dtype").cloned(),
            torch_dtype: fields.value("torch_dtype").cloned(),
            bos_token_id: fields.token_id("bos_token_id")?,
            eos_token_ids: fields.token_ids("eos_token_id")?,
        })
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
            eos_token_ids: self.eos_token_ids,
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
        if let Some(config) = &self.quantization_config {
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

    /// As `transformers` does: the older `rope_scaling` wins, unless it is empty.
    fn rope(&self) -> Result<(f64, RopeKind)> {
        let scaling = self.rope_scaling.as_ref().filter(|map| !map.is_empty());
        let parameters = self.rope_parameters.as_ref();
        let (field, rope) = match scaling.or(parameters) {
            Some(rope) if scaling.is_some() => ("rope_scaling", rope),
            Some(rope) => ("rope_parameters", rope),
            None => return Ok((self.rope_theta.unwrap_or(10000.0), RopeKind::Default)),
        };
        Ok((self.rope_theta(field, rope)?, rope_kind(field, rope)?))
    }

    /// The chosen object's own `rope_theta`, else that of `rope_parameters`, else that of the file.
    fn rope_theta(&self, field: &str, rope: &Map<String, Value>) -> Result<f64> {
        let objects = [
            (field, Some(rope)),
            ("rope_parameters", self.rope_parameters.as_ref()),
        ];
        for (field, object) in objects {
            if let Some(object) = object.filter(|object| object.contains_key("rope_theta")) {
                return number(field, object, "rope_theta");
            }
        }
        Ok(self.rope_theta.unwrap_or(10000.0))
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

fn number(field: &str, rope: &Map<String, Value>, name: &str) -> Result<f64> {
    match rope.get(name).map(|value| (value, value.as_f64())) {
        Some((_, Some(number))) => Ok(number),
        Some((value, None)) => bail!("{field}.{name} is {value}; expected a number"),
        None => bail!("{field} has no {name}; expected a number"),
    }
}

fn rope_kind(field: &str, rope: &Map<String, Value>) -> Result<RopeKind> {
    if let Some(factor) = rope
        .get("partial_rotary_factor")
        .filter(|f| f.as_f64() != Some(1.0))
    {
        bail!("{field}.partial_rotary_factor is {factor}; supported: 1");
    }
    let kind = match rope.get("rope_type").or_else(|| rope.get("type")) {
        None => "default",
        Some(Value::String(kind)) => kind,
        Some(other) => bail!("{field}.rope_type is {other}; expected a name"),
    };
    let number = |name: &str| number(field, rope, name);
    match kind {
        "default" => Ok(RopeKind::Default),
        "linear" => Ok(RopeKind::Linear {
            factor: number("factor")?,
        }),
        "llama3" => Ok(RopeKind::Llama3 {
            factor: number("factor")?,
            low_freq_factor: number("low_freq_factor")?,
            high_freq_factor: number("high_freq_factor")?,
            original_max_position_embeddings: number("original_max_position_embeddings")? as usize,
        }),
        other => {
            bail!("{field}.rope_type is {other:?}; supported: \"default\", \"linear\", \"llama3\"")
        }
    }
}
