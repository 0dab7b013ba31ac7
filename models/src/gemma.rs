//! Gemma 1 (arXiv:2403.08295): norms that scale by 1 + weight, a gated MLP with GELU, embeddings times the root of their width.

use candle_core::{Result, bail};
use serde_json::json;

use crate::activation::Activation;
use crate::config::ModelConfig;
use crate::config_file::ConfigFile;
use crate::family::Family;

/// The family of the first Gemma.
pub static GEMMA: Family = Family {
    model_type: "gemma",
    architecture: "GemmaForCausalLM",
    gguf_architecture: "gemma",
    defaults: || {
        json!({
            "max_position_embeddings": 8192, "num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": true,
            "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "hidden_act": "gelu_pytorch_tanh", "attention_bias": false
        })
    },
    read,
    write: |config| json!({"hidden_act": "gelu_pytorch_tanh", "attention_bias": config.o_bias}),
};

fn read(file: &ConfigFile, config: &mut ModelConfig) -> Result<()> {
    // "gelu" in files of the first release means its tanh too.
    if let Some(name) = &file.hidden_act
        && !["gelu", "gelu_pytorch_tanh"].contains(&name.as_str())
    {
        bail!("hidden_act is {name:?}; supported: \"gelu_pytorch_tanh\", \"gelu\"");
    }
    config.activation = Activation::GeluTanh;
    config.norm_adds_one = true;
    config.embedding_scale = (config.hidden_size as f64).sqrt();
    config.qkv_bias = file.attention_bias;
    config.o_bias = file.attention_bias;
    Ok(())
}
