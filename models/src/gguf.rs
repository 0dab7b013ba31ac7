//! A model as a GGUF file has it: the names of its tensors and what the file says of it, as llama.cpp's own conversion writes them.

use candle_core::{Result, bail};
use candle_parallel::gguf::{GgmlDType, GgufContent, GgufMetadata, GgufTensor, RowChange};

use crate::config::ModelConfig;
use crate::gguf_type::GgufType;
use crate::rope_kind::{RopeKind, yarn_attention_factor};

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
        let architecture = self.family.gguf_architecture;
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
        let takes_biases = ["llama", "qwen2"].contains(&architecture);
        if !takes_biases && (self.qkv_bias || self.o_bias || self.mlp_bias) {
            refuse(&format!(
                "attention_bias is true, and its {architecture} has no biases"
            ))?;
        }
        if architecture == "gemma" && !self.tie_word_embeddings {
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
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let head_dim = self.head_dim;
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
            let up = (inner, hidden, self.mlp_bias, RowChange::None);
            let shapes = [
                (queries, hidden, self.qkv_bias, of_heads),
                (keys, hidden, self.qkv_bias, of_heads),
                (keys, hidden, self.qkv_bias, RowChange::None),
                (hidden, queries, self.o_bias, RowChange::None),
                up,
                up,
                (hidden, inner, self.mlp_bias, RowChange::None),
            ];
            for ((weight, name), (num_out, num_in, has_bias, change)) in
                PROJECTIONS.iter().zip(shapes)
            {
                let mut of_layer = |part: &str, shape: &[usize]| {
                    let (name, weight) = (
                        format!("{block}.{name}.{part}"),
                        format!("{module}.{weight}.{part}"),
                    );
                    add(name, weight, shape, change);
                };
                if has_bias {
                    // A column, of which each value goes with its row.
                    of_layer("bias", &[num_out]);
                }
                of_layer("weight", &[num_out, num_in]);
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
        let (max, head_dim) = (self.max_position_embeddings, self.head_dim);
        let frequencies = |kind: RopeKind| kind.frequencies(self.rope_theta, head_dim, 1, max);
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
                let own = attention_factor / yarn_attention_factor(factor, 1.0);
                if (own - 1.0).abs() > 1e-6 {
                    metadata.set_number(key("attn_factor"), own);
                }
            }
            _ => {}
        }
    }
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
