//! Weights as Hugging Face safetensors folders: read part by part, written tensor by tensor, and what makes writing safe. And
//! checkpoints to resume from.

mod config_dtype;
mod file_writer;
mod folder_lock;
mod gather;
mod hf_save;
mod merge;
mod model_folder;
mod output_folder;
mod plan;
mod run_file;
mod save;
mod save_failure;
mod saved_model;
mod staged_folder;
mod tensor_file;
mod training;
pub(crate) mod weights;
mod whole_file;

pub use crate::files::{
    Checkpoint, INDEX_FILE, Leftover, SpaceNeed, TensorEntry, WEIGHTS_FILE, check_file,
    check_free_space, end_when_a_file_is_cut, open_file, read_file, read_text_file,
    remove_leftovers, size_in_words,
};
pub use candle_launch::open_own_file;
pub use config_dtype::with_config_dtype;
pub use folder_lock::FolderLock;
pub use gather::gather_full;
pub use hf_save::HfSave;
pub use merge::merge_adapter;
pub use model_folder::sidecar_files;
pub use output_folder::{ClaimedFolder, OutputFolder, check_folder_of, check_writable};
pub use save::save_hf;
pub use saved_model::ParamRecord;
pub use staged_folder::StagedFolder;
pub use training::{
    CheckpointManifest, CheckpointNote, CheckpointSaver, FileRecord, SaveOutcome, SavedLayout,
    SetAside, TrainingCheckpoint, checkpoints_in, set_aside_in,
};
pub use whole_file::WholeFile;
