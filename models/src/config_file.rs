//! `config.json` as it is found in the wild.

use candle_core::{Error, Result, bail};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::activation::Activation;
use crate::config::ModelConfig;
use crate::family::Family;
use crate::rope_fields::RopeFields;
use crate::rope_kind::RopeKind;

/// The fields of `config.json` that a computation here depends on, of all families. `null` counts as absent, as in
/// `transformers`.
#[derive(Deserialize)]
pub(crate) struct ConfigFile {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RopeFields>,
    rope_parameters: Option<RopeFields>,
    original_max_position_embeddings: Option<f64>,
    max_position_embeddings: usize,
    #[serde(default)]
    tie_word_embeddings: bool,
    bos_token_id: Option<u32>,
    pad_token_id: Option<i64>,
    #[serde(default)]
    eos_token_id: Vec<u32>,
    // What only some families read.
    pub hidden_act: Option<String>,
    #[serde(default)]
    pub attention_bias: bool,
    #[serde(default)]
    pub mlp_bias: bool,
    #[serde(default)]
    pub use_sliding_window: bool,
    pub sliding_window: Option<usize>,
    pub max_window_layers: Option<usize>,
    pub layer_types: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct Names {
    model_type: Option<String>,
    architectures: Option<Vec<String>>,
}

/// Fields that change the computation, with all values that they may have besides `null`; a family that reads one checks it itself.
/// Others are ignored.
fn supported_values() -> Value {
    json!({
        "hidden_act": ["silu", "swish"],
        "hidden_activation": ["gelu_pytorch_tanh"],
        "dtype": ["float32", "float16", "bfloat16", "auto"],
        "torch_dtype": ["float32", "float16", "bfloat16", "auto"],
        "quantization_config": [],
        "attention_dropout": [0],
        "attention_bias": [false],
        "mlp_bias": [false],
        "sliding_window": [],
        "layer_types": [],
        "per_layer_config": [],
        "partial_rotary_factor": [1],
        "no_rope_layers": [],
        "use_mrope": [false],
        "is_causal": [true],
        "use_bidirectional_attention": [false],
        "use_parallel_residual": [false],
        "use_qk_norm": [false],
        "qk_layernorm": [false],
        "query_pre_attn_scalar": [],
        "attn_logit_softcapping": [],
        "final_logit_softcapping": [],
        "attention_multiplier": [1],
        "embedding_multiplier": [1],
        "residual_multiplier": [1],
        "logits_scaling": [1],
        "logit_scale": [1],
        "num_experts": [0],
        "num_local_experts": [0],
        "n_routed_experts": [0],
        "num_experts_per_tok": [0],
        "moe_intermediate_size": [0]
    })
}

impl ConfigFile {
    /// The configuration that a file's text describes; `find` gives the family of a `model_type`, or of names of classes.
    pub fn read(
        text: &str,
        find: impl FnOnce(Option<&str>, &[String]) -> Result<&'static Family>,
    ) -> Result<ModelConfig> {
        let mut value: Value = serde_json::from_str(text)
            .map_err(|err| Error::msg(format!("not a JSON file: {err}")))?;
        let names: Names = match value.is_object() {
            true => serde_path_to_error::deserialize(&value).map_err(Error::msg)?,
            false => bail!("not a model's configuration: expected a JSON object"),
        };
        let architectures = names.architectures.unwrap_or_default();
        let family = find(names.model_type.as_deref(), &architectures)?;
        if let Value::Object(fields) = &mut value {
            fill(fields, family)?;
        }
        let file: Self = serde_path_to_error::deserialize(value).map_err(Error::msg)?;
        let mut config = file.common(family)?;
        // Before anything is as long as a number of the file.
        config.check_ranges()?;
        (family.read)(&file, &mut config)?;
        Ok(config)
    }

    /// What is the same in all families.
    fn common(&self, family: &'static Family) -> Result<ModelConfig> {
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
            family,
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
            max_position_embeddings: self.max_position_embeddings,
            tie_word_embeddings: self.tie_word_embeddings,
            qkv_bias: false,
            o_bias: false,
            mlp_bias: false,
            activation: Activation::Silu,
            norm_adds_one: false,
            embedding_scale: 1.0,
            qk_norm: false,
            windows: Vec::new(),
            pad_token_id: self.pad_token()?,
            bos_token_id: self.bos_token_id,
            eos_token_ids: self.eos_token_id.clone(),
        })
    }

    /// A negative one counts from the end of the vocabulary, as in `torch.nn.Embedding`.
    fn pad_token(&self) -> Result<Option<u32>> {
        let (size, Some(id)) = (self.vocab_size as i64, self.pad_token_id) else {
            return Ok(None);
        };
        let row = if id < 0 { id.saturating_add(size) } else { id };
        if !(0..size).contains(&row) {
            bail!("pad_token_id is {id}; expected a token below vocab_size({size})");
        }
        Ok(u32::try_from(row).ok())
    }

    /// As `transformers` does: the older `rope_scaling` wins, and the base is that object's own, else that of the file.
    fn rope(&self) -> Result<(f64, RopeKind)> {
        let (name, rope) = match (&self.rope_scaling, &self.rope_parameters) {
            (Some(rope), _) => ("rope_scaling", rope),
            (None, Some(rope)) => ("rope_parameters", rope),
            (None, None) => return Ok((self.rope_theta.unwrap_or(10000.0), RopeKind::Default)),
        };
        let theta = rope.rope_theta.or(self.rope_theta).unwrap_or(10000.0);
        let original = self.original_max_position_embeddings;
        let kind = rope.kind(name, original, self.max_position_embeddings)?;
        Ok((theta, kind))
    }

    /// The file of `config` with frequencies that YaRN scales.
    pub fn with_yarn(text: &str, config: &ModelConfig, factor: f64) -> Result<String> {
        let Some(original) = config.original_context() else {
            bail!(
                "the model's rotary frequencies are scaled already, by {}; YaRN scales those of a model that has the default ones, or YaRN's",
                json!(config.rope)
            );
        };
        let longest = (factor * original as f64).round() as usize;
        let most = config.max_seq_len();
        if longest <= original || longest < most {
            bail!(
                "YaRN's factor {factor} of the {original} tokens that the model was made for is {longest}; expected more than {original}, and no fewer than the {most} tokens that it takes already"
            );
        }
        let mut file: Value = serde_json::from_str(text).map_err(Error::msg)?;
        let names = ["rope_scaling", "rope_parameters"];
        let mut given = names.iter().filter_map(|name| file[*name].as_object());
        let mut rope = given
            .find(|rope| !rope.is_empty())
            .cloned()
            .unwrap_or_default();
        for old in ["type", "attention_factor"] {
            rope.remove(old);
        }
        rope.insert("rope_type".to_string(), json!("yarn"));
        rope.insert("rope_theta".to_string(), json!(config.rope_theta));
        // Of whole tokens, so that readers that divide the lengths have the same one.
        let factor = longest as f64 / original as f64;
        rope.insert("factor".to_string(), json!(factor));
        let name = "original_max_position_embeddings";
        rope.insert(name.to_string(), json!(original));
        if let Some(fields) = file.as_object_mut() {
            // It would win.
            fields.remove(name);
        }
        for name in names {
            file[name] = json!(rope);
        }
        file["max_position_embeddings"] = json!(longest);
        serde_json::to_string_pretty(&file).map_err(Error::msg)
    }

    /// The text of a file that describes `config`.
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
            file["model_type"] = json!(config.family.model_type);
            file["architectures"] = json!([config.family.architecture]);
            file["hidden_act"] = json!("silu");
            file["attention_dropout"] = json!(0.0);
            if let (Value::Object(file), Value::Object(own)) =
                (&mut file, (config.family.write)(config))
            {
                file.extend(own);
            }
            serde_json::to_string_pretty(&file)
        };
        write().map_err(Error::msg)
    }
}

/// Refuses what is not supported, and makes of the fields what [`ConfigFile`] reads: the family's defaults are there, and nothing
/// that is `null`.
fn fill(fields: &mut Map<String, Value>, family: &Family) -> Result<()> {
    let (Value::Object(defaults), Value::Object(supported)) =
        ((family.defaults)(), supported_values())
    else {
        bail!("the defaults of {:?} are no object", family.model_type);
    };
    for (name, supported) in supported {
        let value = fields.get(&name).unwrap_or(&Value::Null);
        if !value.is_null() && !defaults.contains_key(&name) {
            check(
                &name,
                value,
                supported.as_array().map_or(&[], Vec::as_slice),
            )?;
        }
    }
    for (name, default) in defaults {
        fields.entry(name).or_insert(default);
    }
    // `null` in place of a default stands for none.
    fields.retain(|_, value| !value.is_null());
    for name in ["rope_scaling", "rope_parameters"] {
        // serde takes a list for a struct's fields in order.
        if fields.get(name).is_some_and(Value::is_array) {
            bail!("{name}: invalid type: sequence, expected an object");
        }
    }
    if fields.get("rope_scaling").is_some_and(|v| *v == json!({})) {
        fields.remove("rope_scaling");
    }
    // One id or a list of them.
    if let Some(id) = fields.get_mut("eos_token_id").filter(|ids| !ids.is_array()) {
        *id = json!([id.take()]);
    }
    Ok(())
}

/// An error if `value` is not one of those supported.
fn check(name: &str, value: &Value, supported: &[Value]) -> Result<()> {
    let is_same =
        |other: &Value| other == value || other.is_number() && other.as_f64() == value.as_f64();
    if supported.iter().any(is_same) {
        return Ok(());
    }
    let value = value.get("quant_method").unwrap_or(value);
    let names: Vec<String> = supported.iter().map(Value::to_string).collect();
    let names = match names.as_slice() {
        [] => "no such field, or null".to_string(),
        names => names.join(", "),
    };
    bail!("{name} is {value}; supported: {names}")
}
