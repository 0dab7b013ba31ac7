//! A model in a GGUF file: the names of its tensors and what the file says of it, as llama.cpp's own conversion writes them, and back.

use candle_core::{Result, bail};
use candle_parallel::checkpoint::Checkpoint;
use candle_parallel::gguf::{
    GgmlDType, GgufContent, GgufMetadata, GgufReader, GgufTensor, GgufValue, RowChange,
};

use crate::activation::Activation;
use crate::config::ModelConfig;
use crate::families::FAMILIES;
use crate::gguf_type::GgufType;
use crate::rope_kind::RopeKind;

/// What the blocks of a file are quantised by.
const QUANTIZATION_VERSION: usize = 2;
/// The tensor of what Llama 3's frequencies are divided by.
const ROPE_FREQS: &str = "rope_freqs.weight";

/// Turns in the original context between which llama.cpp's YaRN has its ramp.
const YARN_BETAS: (f64, f64) = (32.0, 1.0);

/// Projections of a layer: name in the model, name in a file.
const PROJECTIONS: [(&str, &str); 7] = [
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// The name that a linear layer of the model has in a GGUF file, without `.weight`, such as `blk.0.attn_q` for
/// `model.layers.0.self_attn.q_proj`.
pub fn gguf_layer(module: &str) -> Option<String> {
    if module == "lm_head" {
        return Some("output".to_string());
    }
    let (layer, projection) = module.strip_prefix("model.layers.")?.split_once('.')?;
    let mut names = PROJECTIONS.iter();
    let (_, name) = names.find(|(own, _)| *own == projection)?;
    Some(format!("blk.{layer}.{name}"))
}

impl ModelConfig {
    /// An error if llama.cpp would compute something else than this configuration says, or cannot.
    ///
    /// # Errors
    /// What it does not know.
    pub fn check_gguf(&self) -> Result<()> {
        let family = self.family.model_type;
        let refuse =
            |what: &str| -> Result<()> { bail!("llama.cpp cannot run this model: {what}") };
        match self.rope {
            RopeKind::Dynamic { .. } => refuse(
                "its rope_type is \"dynamic\", frequencies that depend on a text's length, which llama.cpp does not have; it has \"default\", \
                 \"linear\", \"llama3\" and \"yarn\"\nhint: finetune --rope-scaling yarn:FACTOR trains a model with those of YaRN, from one with default ones",
            )?,
            RopeKind::Yarn {
                truncate: false, ..
            } => refuse(
                "its rope_parameters have \"truncate\": false, and llama.cpp's YaRN begins and ends at whole pairs",
            )?,
            RopeKind::Yarn {
                beta_fast,
                beta_slow,
                ..
            } if (beta_fast, beta_slow) != YARN_BETAS => refuse(&format!(
                "its rope_parameters have beta_fast {beta_fast} and beta_slow {beta_slow}, and llama.cpp's YaRN has {} and {} in this architecture",
                YARN_BETAS.0, YARN_BETAS.1
            ))?,
            _ => {}
        }
        let takes_biases = ["llama", "mistral", "qwen2"].contains(&family);
        if !takes_biases && (self.qkv_bias || self.o_bias || self.mlp_bias) {
            refuse(&format!(
                "attention_bias is true, and its {family} has no biases"
            ))?;
        }
        if family == "gemma" && !self.tie_word_embeddings {
            refuse("tie_word_embeddings is false, and the head of its gemma is the embedding")?;
        }
        Ok(())
    }

    /// What llama.cpp does otherwise than the model, where that is no reason to refuse it: lines.
    pub fn gguf_differences(&self) -> Vec<String> {
        let windows = (0..self.num_hidden_layers).filter_map(|layer| self.window(layer));
        let smallest = windows.min().filter(|window| *window < self.max_seq_len());
        let line = |window| {
            format!(
                "llama.cpp has no windows of attention in {}: a text of more than {window} tokens is seen as a whole there, other than in training",
                self.family.gguf_architecture
            )
        };
        smallest.map(line).into_iter().collect()
    }

    /// The tensors of a file of this type, and lines that say which of them have another type than usual.
    ///
    /// # Errors
    /// As for [`Self::check_gguf`].
    pub fn gguf_tensors(&self, dtype: GgufType) -> Result<(Vec<GgufTensor>, Vec<String>)> {
        self.check_gguf()?;
        let mut tensors = Vec::new();
        if let Some(factors) = self.rope_factors() {
            tensors.push(GgufTensor {
                name: ROPE_FREQS.to_string(),
                shape: vec![factors.len()],
                dtype: GgmlDType::F32,
                content: GgufContent::Values(factors),
            });
        }
        let mut add = |name: String, weight: String, shape: &[usize], change: RowChange| {
            tensors.push(GgufTensor {
                name,
                shape: shape.to_vec(),
                dtype: GgmlDType::F32,
                content: GgufContent::Weight {
                    name: weight,
                    change,
                },
            });
        };
        let (hidden, head_dim) = (self.hidden_size, self.head_dim);
        let queries = self.num_attention_heads * head_dim;
        let keys = self.num_key_value_heads * head_dim;
        let of_norm = match self.norm_adds_one {
            true => RowChange::PlusOne,
            false => RowChange::None,
        };
        let of_heads = self.gguf_heads();
        let embedding = [self.vocab_size, hidden];
        let (name, weight) = ("token_embd.weight", "model.embed_tokens.weight");
        add(name.into(), weight.into(), &embedding, RowChange::None);
        for layer in 0..self.num_hidden_layers {
            let (block, module) = (format!("blk.{layer}"), format!("model.layers.{layer}"));
            let mut norm = |name: &str, weight: &str, width: usize| {
                let (name, weight) = (
                    format!("{block}.{name}.weight"),
                    format!("{module}.{weight}.weight"),
                );
                add(name, weight, &[width], of_norm);
            };
            norm("attn_norm", "input_layernorm", hidden);
            norm("ffn_norm", "post_attention_layernorm", hidden);
            if self.qk_norm {
                norm("attn_q_norm", "self_attn.q_norm", head_dim);
                norm("attn_k_norm", "self_attn.k_norm", head_dim);
            }
            let shapes = [
                (queries, hidden, self.qkv_bias, of_heads),
                (keys, hidden, self.qkv_bias, of_heads),
                (keys, hidden, self.qkv_bias, RowChange::None),
                (hidden, queries, self.o_bias, RowChange::None),
                (
                    self.intermediate_size,
                    hidden,
                    self.mlp_bias,
                    RowChange::None,
                ),
                (
                    self.intermediate_size,
                    hidden,
                    self.mlp_bias,
                    RowChange::None,
                ),
                (
                    hidden,
                    self.intermediate_size,
                    self.mlp_bias,
                    RowChange::None,
                ),
            ];
            for ((weight, name), (num_out, num_in, has_bias, change)) in
                PROJECTIONS.iter().zip(shapes)
            {
                let (name, weight) = (format!("{block}.{name}"), format!("{module}.{weight}"));
                if has_bias {
                    // A column, of which each value goes with its row.
                    add(
                        format!("{name}.bias"),
                        format!("{weight}.bias"),
                        &[num_out],
                        change,
                    );
                }
                let shape = [num_out, num_in];
                add(
                    format!("{name}.weight"),
                    format!("{weight}.weight"),
                    &shape,
                    change,
                );
            }
        }
        let (name, weight) = ("output_norm.weight", "model.norm.weight");
        add(name.into(), weight.into(), &[hidden], of_norm);
        if !self.tie_word_embeddings {
            let (name, weight) = ("output.weight", "lm_head.weight");
            add(name.into(), weight.into(), &embedding, RowChange::None);
        }
        let lines = dtype.mix(self, &mut tensors);
        Ok((tensors, lines))
    }

    /// How llama.cpp has the rows of q and k.
    fn gguf_heads(&self) -> RowChange {
        match self.family.gguf_architecture {
            "llama" => RowChange::Interleaved {
                head_dim: self.head_dim,
            },
            _ => RowChange::None,
        }
    }

    /// What the default frequencies are divided by, pair by pair, where llama.cpp does not compute it.
    fn rope_factors(&self) -> Option<Vec<f32>> {
        let RopeKind::Llama3 { .. } = self.rope else {
            return None;
        };
        let frequencies = |kind: RopeKind| {
            kind.frequencies(
                self.rope_theta,
                self.head_dim,
                1,
                self.max_position_embeddings,
            )
        };
        let default = frequencies(RopeKind::Default);
        let scaled = frequencies(self.rope);
        let factors = default.iter().zip(&scaled);
        Some(factors.map(|(default, scaled)| default / scaled).collect())
    }

    /// What a file says of the model; `name` is what it is called, and `num_values` how many values its weights have.
    pub fn gguf_metadata(&self, name: &str, dtype: GgufType, num_values: u64) -> GgufMetadata {
        let mut metadata = GgufMetadata::default();
        let arch = self.family.gguf_architecture;
        metadata.set_text("general.architecture", arch);
        metadata.set_text("general.type", "model");
        metadata.set_text("general.name", name);
        metadata.set_text("general.size_label", size_label(num_values));
        let counts = [
            ("block_count", self.num_hidden_layers),
            ("context_length", self.max_seq_len()),
            ("embedding_length", self.hidden_size),
            ("feed_forward_length", self.intermediate_size),
            ("attention.head_count", self.num_attention_heads),
            ("attention.head_count_kv", self.num_key_value_heads),
            ("attention.key_length", self.head_dim),
            ("attention.value_length", self.head_dim),
            ("rope.dimension_count", self.head_dim),
            ("vocab_size", self.vocab_size),
        ];
        for (key, count) in counts {
            metadata.set_count(format!("{arch}.{key}"), count);
        }
        let eps = format!("{arch}.attention.layer_norm_rms_epsilon");
        metadata.set_number(eps, self.rms_norm_eps);
        metadata.set_number(format!("{arch}.rope.freq_base"), self.rope_theta);
        self.set_rope_scaling(&mut metadata);
        metadata.set_count("general.file_type", dtype.file_type());
        metadata.set_count("general.quantization_version", QUANTIZATION_VERSION);
        metadata
    }

    fn set_rope_scaling(&self, metadata: &mut GgufMetadata) {
        let key = |name: &str| format!("{}.rope.scaling.{name}", self.family.gguf_architecture);
        match self.rope {
            RopeKind::Linear { factor } => {
                metadata.set_text(key("type"), "linear");
                metadata.set_number(key("factor"), factor);
            }
            RopeKind::Yarn {
                factor,
                original_max_position_embeddings,
                attention_factor,
                ..
            } => {
                metadata.set_text(key("type"), "yarn");
                metadata.set_number(key("factor"), factor);
                let original = original_max_position_embeddings;
                metadata.set_count(key("original_context_length"), original);
                // llama.cpp multiplies by that of the paper itself.
                let own = attention_factor / yarn_attention_factor(factor);
                if (own - 1.0).abs() > 1e-6 {
                    metadata.set_number(key("attn_factor"), own);
                }
            }
            _ => {}
        }
    }

    /// The weights of the model in a file, under their names in transformers. They are decoded when they are read.
    ///
    /// # Errors
    /// A tensor that the file does not have, or has in another shape, or that the model does not have.
    pub fn gguf_weights(&self, file: GgufReader) -> Result<Checkpoint> {
        let (tensors, _) = self.gguf_tensors(GgufType::F32)?;
        let is_known = |name: &str| tensors.iter().any(|tensor| tensor.name == name);
        let mut others = file.tensors().iter().filter(|other| !is_known(&other.name));
        if let Some(other) = others.next() {
            bail!(
                "the file has the tensor {}, which its {} does not have here: what it computes with it would be left out",
                other.name,
                self.family.gguf_architecture
            );
        }
        file.into_checkpoint(&tensors)
    }

    /// The configuration of the model in a file.
    ///
    /// # Errors
    /// A model that this crate does not have; what the file does not say.
    pub fn from_gguf(file: &GgufReader) -> Result<Self> {
        let metadata = file.metadata();
        if text(&metadata, "general.type").as_deref() == Some("adapter") {
            bail!("the file has an adapter, and no model");
        }
        let Some(arch) = text(&metadata, "general.architecture") else {
            bail!("the file does not say what model it has: general.architecture is missing");
        };
        let Some(family) = FAMILIES
            .iter()
            .find(|family| family.gguf_architecture == arch)
        else {
            let mut known: Vec<_> = FAMILIES.iter().map(|it| it.gguf_architecture).collect();
            known.dedup();
            bail!(
                "general.architecture is {arch:?}; supported: {}",
                known.join(", ")
            );
        };
        check_known(&metadata, &arch)?;
        let key = |name: &str| format!("{arch}.{name}");
        let find = |name: &str| count(&metadata, &key(name));
        let need = |name: &str| match find(name) {
            Some(count) => Ok(count),
            None => bail!("the file has no {}, a count", key(name)),
        };
        let has = |tensor: &str| file.tensor(tensor).is_some();
        let tokens = metadata.get("tokenizer.ggml.tokens").map(GgufValue::to_vec);
        let num_tokens = tokens.and_then(Result::ok).map(Vec::len);
        let (hidden_size, heads) = (need("embedding_length")?, need("attention.head_count")?);
        let Some(vocab_size) = num_tokens.or(find("vocab_size")) else {
            bail!(
                "the file has neither tokenizer.ggml.tokens nor {}",
                key("vocab_size")
            );
        };
        let Some(eps) = number(&metadata, &key("attention.layer_norm_rms_epsilon")) else {
            bail!(
                "the file has no {}, a number",
                key("attention.layer_norm_rms_epsilon")
            );
        };
        let is_gemma = family.model_type == "gemma";
        let id = |name: &str| {
            let id = count(&metadata, &format!("tokenizer.ggml.{name}_token_id"));
            id.and_then(|id| u32::try_from(id).ok())
        };
        let mut config = Self {
            family,
            vocab_size,
            hidden_size,
            intermediate_size: need("feed_forward_length")?,
            num_hidden_layers: need("block_count")?,
            num_attention_heads: heads,
            num_key_value_heads: find("attention.head_count_kv").unwrap_or(heads),
            head_dim: match find("attention.key_length") {
                Some(head_dim) => head_dim,
                None => hidden_size / heads.max(1),
            },
            rms_norm_eps: shortest(eps),
            rope_theta: number(&metadata, &key("rope.freq_base")).map_or(10_000.0, shortest),
            rope: RopeKind::Default,
            max_position_embeddings: need("context_length")?,
            tie_word_embeddings: !has("output.weight"),
            qkv_bias: has("blk.0.attn_q.bias"),
            o_bias: has("blk.0.attn_output.bias"),
            mlp_bias: has("blk.0.ffn_gate.bias"),
            activation: match is_gemma {
                true => Activation::GeluTanh,
                false => Activation::Silu,
            },
            norm_adds_one: is_gemma,
            embedding_scale: match is_gemma {
                true => (hidden_size as f64).sqrt(),
                false => 1.0,
            },
            qk_norm: has("blk.0.attn_q_norm.weight"),
            windows: Vec::new(),
            pad_token_id: id("padding"),
            bos_token_id: id("bos"),
            eos_token_ids: [id("eos"), id("eot")].into_iter().flatten().collect(),
        };
        config.check_ranges()?;
        for name in ["rope.dimension_count", "attention.value_length"] {
            let found = find(name).unwrap_or(config.head_dim);
            if found != config.head_dim {
                bail!(
                    "{} is {found}; supported: the width of a head, {}",
                    key(name),
                    config.head_dim
                );
            }
        }
        if let Some(window) = find("attention.sliding_window")
            && window < config.max_position_embeddings
        {
            bail!(
                "{} is {window}: which layers have it is not known here",
                key("attention.sliding_window")
            );
        }
        config.read_rope_scaling(&metadata)?;
        if has(ROPE_FREQS) {
            config.find_llama3(&file.values(ROPE_FREQS)?)?;
        }
        config.validate()?;
        Ok(config)
    }

    fn read_rope_scaling(&mut self, metadata: &GgufMetadata) -> Result<()> {
        let key = |name: &str| format!("{}.rope.scaling.{name}", self.family.gguf_architecture);
        let number = |name: &str| number(metadata, &key(name)).map(shortest);
        let factor = number("factor").unwrap_or(1.0);
        if factor <= 0.0 {
            bail!("{} is {factor}; expected a positive number", key("factor"));
        }
        let betas = (number("yarn_beta_fast"), number("yarn_beta_slow"));
        let betas = (
            betas.0.unwrap_or(YARN_BETAS.0),
            betas.1.unwrap_or(YARN_BETAS.1),
        );
        if betas != YARN_BETAS {
            bail!(
                "{} and _slow are {betas:?}; llama.cpp has {YARN_BETAS:?} in this architecture",
                key("yarn_beta_fast")
            );
        }
        match text(metadata, &key("type")).as_deref() {
            None | Some("none") => {}
            Some("linear") => {
                // The length that the file gives is that with it.
                let longest = self.max_position_embeddings as f64;
                self.max_position_embeddings = (longest / factor).round() as usize;
                self.rope = RopeKind::Linear { factor };
            }
            Some("yarn") => {
                let own = number("attn_factor").unwrap_or(1.0);
                let original = count(metadata, &key("original_context_length"));
                self.rope = RopeKind::Yarn {
                    factor,
                    original_max_position_embeddings: original
                        .unwrap_or(self.max_position_embeddings),
                    attention_factor: own * yarn_attention_factor(factor),
                    beta_fast: YARN_BETAS.0,
                    beta_slow: YARN_BETAS.1,
                    truncate: true,
                };
            }
            Some(other) => bail!(
                "{} is {other:?}; supported: none, linear, yarn",
                key("type")
            ),
        }
        Ok(())
    }

    /// The numbers of Llama 3's frequencies, of which a file has only what follows from them.
    fn find_llama3(&mut self, factors: &[f32]) -> Result<()> {
        let factor = factors.iter().copied().fold(1.0, f32::max);
        let originals = (4..=24).map(|power| 1usize << power);
        for original in originals {
            self.rope = RopeKind::Llama3 {
                factor: f64::from(factor),
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: original,
            };
            let own = self.rope_factors().unwrap_or_default();
            let is_same = |(own, found): (&f32, &f32)| (own / found - 1.0).abs() < 1e-4;
            if own.len() == factors.len() && own.iter().zip(factors).all(is_same) {
                return Ok(());
            }
        }
        bail!(
            "{ROPE_FREQS} divides the rotary frequencies by {factors:?}, which is not how Llama 3 scales them with low_freq_factor 1 and \
             high_freq_factor 4"
        )
    }
}

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

/// An error if a file says something of the model that is not read here, or not in its type.
fn check_known(metadata: &GgufMetadata, arch: &str) -> Result<()> {
    for (key, value) in metadata.iter() {
        let Some(name) = key
            .strip_prefix(arch)
            .and_then(|name| name.strip_prefix('.'))
        else {
            continue;
        };
        let is_read = count(metadata, key).is_some() || value.to_f32().is_ok();
        let is_read = is_read || value.to_string().is_ok() || value.to_bool().is_ok();
        if !KNOWN.contains(&name) || !is_read {
            bail!(
                "the file has {key} {value:?}, which is not known here: the model may compute something else"
            );
        }
    }
    Ok(())
}

/// The paper's factor of cosines and sines (arXiv:2309.00071, equation 22).
fn yarn_attention_factor(factor: f64) -> f64 {
    match factor > 1.0 {
        true => 0.1 * factor.ln() + 1.0,
        false => 1.0,
    }
}

/// The number of f64 that prints as an f32 does: 1e-6 is that again.
fn shortest(number: f32) -> f64 {
    number.to_string().parse().unwrap_or(f64::from(number))
}

fn text(metadata: &GgufMetadata, key: &str) -> Option<String> {
    metadata.get(key)?.to_string().ok().cloned()
}

fn count(metadata: &GgufMetadata, key: &str) -> Option<usize> {
    let value = metadata.get(key)?;
    let signed = || {
        value
            .to_i32()
            .ok()
            .and_then(|number| u64::try_from(number).ok())
    };
    let count = value.to_u64().ok().or_else(signed)?;
    usize::try_from(count).ok()
}

fn number(metadata: &GgufMetadata, key: &str) -> Option<f32> {
    metadata.get(key)?.to_f32().ok()
}

/// A number of values with two digits or more and its unit: 494M, 1.2B.
fn size_label(num_values: u64) -> String {
    let number = num_values as f64;
    let (scaled, unit) = match num_values {
        1_000_000_000_000.. => (number / 1e12, "T"),
        1_000_000_000.. => (number / 1e9, "B"),
        1_000_000.. => (number / 1e6, "M"),
        _ => (number / 1e3, "K"),
    };
    match scaled.round() < 10.0 {
        true => format!("{scaled:.1}{unit}"),
        false => format!("{scaled:.0}{unit}"),
    }
}
