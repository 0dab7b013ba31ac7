//! Weights as Hugging Face safetensors folders: read part by part, written tensor by tensor.

mod gather;
mod plan;
mod reader;
mod save;

pub use gather::gather_full;
pub use reader::{Checkpoint, INDEX_FILE, TensorEntry, WEIGHTS_FILE};
pub(crate) use save::save_with_masters;
pub use save::{HfSave, save_hf, sidecar_files};
