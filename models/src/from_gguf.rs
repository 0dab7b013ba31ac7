//! The model in a GGUF file. What the file says is put into the words of `config.json`, which the family reads as ever.

use candle_core::{Result, bail};
use candle_parallel::checkpoint::Checkpoint;
use candle_parallel::gguf::{GgufMetadata, GgufReader, GgufValue};
use serde_json::{Value, json};

use crate::config::ModelConfig;
use crate::families::FAMILIES;
use crate::gguf::{ROPE_FREQS, YARN_BETAS, yarn_attention_factor};
use crate::gguf_type::GgufType;
use crate::rope_kind::RopeKind;

/// What a file may say of a model, after the architecture's name.
const KNOWN: [&str; 20] = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.finetuned",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
];

impl ModelConfig {
    /// The configuration of the model in a file.
    ///
    /// # Errors
    /// A model that this crate does not have; what the file says of it and is not known here, or does not say.
    pub fn from_gguf(file: &GgufReader) -> Result<Self> {
        let metadata = file.metadata();
        let general = Fields::new(&metadata, "general");
        if general.text("type")?.as_deref() == Some("adapter") {
            bail!("the file has an adapter, and no model");
        }
        let architecture = need(general.text("architecture")?, "general.architecture")?;
        let mut families = FAMILIES.iter();
        let Some(family) = families.find(|family| family.gguf_architecture == architecture) else {
            let mut known: Vec<_> = FAMILIES.iter().map(|it| it.gguf_architecture).collect();
            known.dedup();
            bail!(
                "general.architecture is {architecture:?}; supported: {}",
                known.join(", ")
            );
        };
        let fields = Fields::new(&metadata, &architecture);
        fields.check_known()?;
        let tokenizer = Fields::new(&metadata, "tokenizer.ggml");
        let has = |tensor: &str| file.tensor(tensor).is_some();
        let count = |name: &str| need(fields.count(name)?, &fields.key(name));
        let (longest, rope) = fields.rope_scaling(count("context_length")?)?;
        let ends = [
            tokenizer.count("eos_token_id")?,
            tokenizer.count("eot_token_id")?,
        ];
        let eps = fields.number("attention.layer_norm_rms_epsilon")?;
        let config = json!({
            "model_type": family.model_type,
            "vocab_size": match tokenizer.len("tokens")? {
                Some(len) => len,
                None => count("vocab_size")?,
            },
            "hidden_size": count("embedding_length")?,
            "intermediate_size": count("feed_forward_length")?,
            "num_hidden_layers": count("block_count")?,
            "num_attention_heads": count("attention.head_count")?,
            "num_key_value_heads": fields.count("attention.head_count_kv")?,
            "head_dim": fields.count("attention.key_length")?,
            "rms_norm_eps": need(eps, &fields.key("attention.layer_norm_rms_epsilon"))?,
            "rope_theta": fields.number("rope.freq_base")?,
            "rope_scaling": rope,
            "max_position_embeddings": longest,
            "tie_word_embeddings": !has("output.weight"),
            "attention_bias": has("blk.0.attn_q.bias"),
            "mlp_bias": has("blk.0.ffn_gate.bias"),
            "pad_token_id": tokenizer.count("padding_token_id")?,
            "bos_token_id": tokenizer.count("bos_token_id")?,
            "eos_token_id": ends.into_iter().flatten().collect::<Vec<_>>(),
        });
        let mut config = Self::from_json(&config.to_string())?;
        for name in ["rope.dimension_count", "attention.value_length"] {
            let found = fields.count(name)?.unwrap_or(config.head_dim);
            if found != config.head_dim {
                bail!(
                    "{} is {found}; supported: the width of a head, {}",
                    fields.key(name),
                    config.head_dim
                );
            }
        }
        let window = fields.count("attention.sliding_window")?;
        if let Some(window) = window.filter(|window| *window < config.max_seq_len()) {
            bail!(
                "{} is {window}: which layers have it is not known here",
                fields.key("attention.sliding_window")
            );
        }
        if has(ROPE_FREQS) {
            config.rope = config.llama3_of(&file.values(ROPE_FREQS)?)?;
        }
        Ok(config)
    }

    /// The weights of the model in a file, under their names in transformers. They are decoded when they are read.
    ///
    /// # Errors
    /// A tensor that the file does not have, or has in another shape, or that the model does not have.
    pub fn gguf_weights(&self, file: GgufReader) -> Result<Checkpoint> {
        let (tensors, _) = self.gguf_tensors(GgufType::F32)?;
        let is_known = |name: &str| tensors.iter().any(|tensor| tensor.name == name);
        let mut others = file.tensors().iter();
        if let Some(other) = others.find(|other| !is_known(&other.name)) {
            bail!(
                "the file has the tensor {}, which its {} does not have here: what it computes with it would be left out",
                other.name,
                self.family.gguf_architecture
            );
        }
        Checkpoint::from_gguf(&file, &tensors)
    }

    /// The frequencies of Llama 3 that divide the default ones by these factors, which are all that a file has of them.
    fn llama3_of(&self, factors: &[f32]) -> Result<RopeKind> {
        let factor = factors.iter().copied().fold(1.0, f32::max);
        for power in 4..=24 {
            let rope = RopeKind::Llama3 {
                factor: f64::from(factor),
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 1 << power,
            };
            let config = Self {
                rope,
                ..self.clone()
            };
            let own = config.rope_factors().unwrap_or_default();
            let is_same = |(own, found): (&f32, &f32)| (own / found - 1.0).abs() < 1e-4;
            if own.len() == factors.len() && own.iter().zip(factors).all(is_same) {
                return Ok(rope);
            }
        }
        bail!(
            "{ROPE_FREQS} divides the rotary frequencies by {factors:?}, which is not how Llama 3 scales them with low_freq_factor 1 and \
             high_freq_factor 4"
        )
    }
}

/// What a file says under one name.
struct Fields<'a> {
    metadata: &'a GgufMetadata,
    prefix: &'a str,
}

impl<'a> Fields<'a> {
    fn new(metadata: &'a GgufMetadata, prefix: &'a str) -> Self {
        Self { metadata, prefix }
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    /// A value, if there is one; one of another kind is an error.
    fn find<T>(
        &self,
        name: &str,
        kind: &str,
        read: impl Fn(&GgufValue) -> Option<T>,
    ) -> Result<Option<T>> {
        let key = self.key(name);
        let Some(value) = self.metadata.get(&key) else {
            return Ok(None);
        };
        match read(value) {
            Some(found) => Ok(Some(found)),
            None => bail!("{key} is {value:?}; expected {kind}"),
        }
    }

    fn count(&self, name: &str) -> Result<Option<usize>> {
        self.find(name, "a count", |value| match value {
            GgufValue::I32(number) => usize::try_from(*number).ok(),
            GgufValue::Bool(_) => None,
            value => usize::try_from(value.to_u64().ok()?).ok(),
        })
    }

    /// The number of f64 that prints as the file's does: 1e-6 is that again.
    fn number(&self, name: &str) -> Result<Option<f64>> {
        self.find(name, "a number of 32 bits", |value| {
            value.to_f32().ok()?.to_string().parse().ok()
        })
    }

    fn text(&self, name: &str) -> Result<Option<String>> {
        self.find(name, "a text", |value| value.to_string().ok().cloned())
    }

    /// The length of a list.
    fn len(&self, name: &str) -> Result<Option<usize>> {
        self.find(name, "a list", |value| value.to_vec().ok().map(Vec::len))
    }

    /// An error if the file says something of the model that is not read here.
    fn check_known(&self) -> Result<()> {
        let names = self.metadata.iter().filter_map(|(key, _)| {
            let name = key.strip_prefix(self.prefix)?;
            name.strip_prefix('.')
        });
        match names.into_iter().find(|name| !KNOWN.contains(name)) {
            None => Ok(()),
            Some(name) => bail!(
                "the file has {}, which is not known here: the model may compute something else",
                self.key(name)
            ),
        }
    }

    /// What `config.json` has as `max_position_embeddings` and `rope_scaling`, of a model of so many positions.
    fn rope_scaling(&self, longest: usize) -> Result<(usize, Value)> {
        let factor = self.number("rope.scaling.factor")?.unwrap_or(1.0);
        let betas = ["rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"];
        for (name, usual) in betas.into_iter().zip([YARN_BETAS.0, YARN_BETAS.1]) {
            let beta = self.number(name)?.unwrap_or(usual);
            if beta != usual {
                bail!(
                    "{} is {beta}; llama.cpp has {usual} in this architecture",
                    self.key(name)
                );
            }
        }
        match self.text("rope.scaling.type")?.as_deref() {
            None | Some("none") => Ok((longest, Value::Null)),
            Some(_) if factor <= 0.0 => bail!(
                "{} is {factor}; expected a positive number",
                self.key("rope.scaling.factor")
            ),
            // Positions are counted with the factor in a file, and without it in config.json.
            Some("linear") => Ok((
                (longest as f64 / factor).round() as usize,
                json!({"rope_type": "linear", "factor": factor}),
            )),
            Some("yarn") => {
                let own = self.number("rope.scaling.attn_factor")?.unwrap_or(1.0);
                let rope = json!({
                    "rope_type": "yarn", "factor": factor,
                    "original_max_position_embeddings": self.count("rope.scaling.original_context_length")?,
                    "attention_factor": own * yarn_attention_factor(factor),
                });
                Ok((longest, rope))
            }
            Some(other) => bail!(
                "{} is {other:?}; supported: none, linear, yarn",
                self.key("rope.scaling.type")
            ),
        }
    }
}

fn need<T>(found: Option<T>, key: &str) -> Result<T> {
    match found {
        Some(found) => Ok(found),
        None => bail!("the file does not say {key}"),
    }
}
