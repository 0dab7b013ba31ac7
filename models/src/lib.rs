//! Decoder-only language models as Hugging Face stores them, built on the parallel layers: a chain of blocks, which are
//! embedding, decoder layers and head with loss.
#![forbid(unsafe_code)]

mod activation;
mod attention;
mod causal_lm;
mod config;
mod config_file;
mod decoder_layer;
mod families;
mod family;
mod gemma;
mod gguf;
mod gguf_type;
mod llama;
mod lm_head;
mod mistral;
mod mlp;
mod model_flops;
mod norm;
mod qwen2;
mod qwen3;
mod rope_fields;
mod rope_kind;
mod rotary;
mod scaled_embedding;

pub use activation::Activation;
pub use causal_lm::{CausalLm, PartConfig};
pub use config::ModelConfig;
pub use decoder_layer::DecoderLayer;
pub use families::FAMILIES;
pub use family::Family;
pub use gemma::GEMMA;
pub use gguf::gguf_layer;
pub use gguf_type::GgufType;
pub use llama::LLAMA;
pub use lm_head::LmHead;
pub use mistral::MISTRAL;
pub use model_flops::{block_costs, flops_per_token};
pub use qwen2::QWEN2;
pub use qwen3::QWEN3;
pub use rope_kind::RopeKind;
pub use rotary::RotaryTable;
