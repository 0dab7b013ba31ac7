//! Weights as Hugging Face safetensors folders: read part by part, written tensor by tensor. And checkpoints to resume from.

mod gather;
mod plan;
mod reader;
mod save;
mod training;

pub use gather::gather_full;
pub use reader::{Checkpoint, INDEX_FILE, TensorEntry, WEIGHTS_FILE};
pub(crate) use save::save_with_masters;
pub use save::{HfSave, save_hf, sidecar_files};
pub use training::{CheckpointSaver, SaveOutcome, TrainingCheckpoint, Xxh64};
