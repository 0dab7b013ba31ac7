//! Qwen3 (arXiv:2505.09388): RMS norms of each query and key head, heads of a width of their own.

use serde_json::json;

use crate::family::Family;
use crate::qwen2;

/// The family of Qwen3's dense models.
pub static QWEN3: Family = Family {
    model_type: "qwen3",
    architecture: "Qwen3ForCausalLM",
    gguf_architecture: "qwen3",
    defaults: || {
        let mut fields = qwen2::defaults();
        fields["head_dim"] = json!(128);
        fields["attention_bias"] = json!(false);
        fields
    },
    read: |file, config| {
        config.qk_norm = true;
        config.qkv_bias = file.attention_bias;
        config.o_bias = file.attention_bias;
        qwen2::read_windows(file, config)
    },
    write: |config| {
        let mut fields = qwen2::write_windows(config);
        fields["attention_bias"] = json!(config.o_bias);
        fields
    },
};
