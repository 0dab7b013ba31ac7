//! Llama (arXiv:2302.13971, arXiv:2407.21783): biases on all linear layers of attention and of the MLP, or none.

use candle_core::Result;
use serde_json::json;

use crate::config::ModelConfig;
use crate::config_file::ConfigFile;
use crate::family::Family;

/// The family of Llama 1, 2 and 3.
pub static LLAMA: Family = Family {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    gguf_architecture: "llama",
    defaults: || json!({"max_position_embeddings": 2048, "attention_bias": false, "mlp_bias": false}),
    read,
    write: |config| json!({"attention_bias": config.o_bias, "mlp_bias": config.mlp_bias}),
};

fn read(file: &ConfigFile, config: &mut ModelConfig) -> Result<()> {
    config.qkv_bias = file.attention_bias;
    config.o_bias = file.attention_bias;
    config.mlp_bias = file.mlp_bias;
    Ok(())
}
