//! Llama (arXiv:2302.13971, arXiv:2407.21783) as Hugging Face stores it, as a chain of blocks:
//! embedding, decoder layers, head with loss.

mod attention;
mod config;
mod config_file;
mod decoder_layer;
mod head;
mod mlp;
mod model;
mod norm;
mod rotary;

pub use config::{LlamaConfig, RopeKind};
pub use decoder_layer::DecoderLayer;
pub use head::Head;
pub use model::Llama;
pub use rotary::RotaryTable;
