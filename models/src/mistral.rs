//! Mistral (arXiv:2310.06825): no biases; every layer has the same window, or none has.

use candle_core::Result;
use serde_json::json;

use crate::config::ModelConfig;
use crate::config_file::ConfigFile;
use crate::family::Family;

/// The family of Mistral 7B.
pub static MISTRAL: Family = Family {
    model_type: "mistral",
    architecture: "MistralForCausalLM",
    gguf_architecture: "llama",
    defaults: || json!({"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}),
    read,
    write: |config| json!({"sliding_window": config.window(0)}),
};

fn read(file: &ConfigFile, config: &mut ModelConfig) -> Result<()> {
    if file.sliding_window.is_some() {
        config.windows = vec![file.sliding_window; config.num_hidden_layers];
    }
    Ok(())
}
