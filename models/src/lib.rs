//! Decoder-only language models as Hugging Face stores them, built on the parallel layers: a chain of blocks, which are
//! embedding, decoder layers and head with loss.
#![forbid(unsafe_code)]

mod attention;
mod causal_lm;
mod config;
mod config_file;
mod decoder_layer;
mod head;
mod mlp;
mod norm;
mod rotary;

pub use causal_lm::CausalLm;
pub use config::{ModelConfig, RopeKind};
pub use decoder_layer::DecoderLayer;
pub use head::Head;
pub use rotary::RotaryTable;
