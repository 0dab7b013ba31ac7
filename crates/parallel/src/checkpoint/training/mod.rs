//! Training checkpoints: everything that a run needs to go on, divided over files as it is over ranks.
//!
//! ```text
//! SAVE_DIR/step-000015/            after 15 steps
//!     rank-00000.safetensors       what rank 0 is the first to hold: weights in f32, moments
//!     rank-00001.safetensors       ..
//!     model/config.json            and what else a model has beside its weights
//!     manifest.json                step, parameters, sizes and checksums of the files, the caller's record; written last
//! ```
//!
//! **What is written.** Each value of a trainable parameter is written once, in f32, by the first rank of the mesh that updates it:
//! the weight (the master of a 16-bit one) and each kind of state. No rank gathers anything. Weights of 16 bits are their rounded
//! masters, so they are left out. So are frozen parameters that a file has, which still have its values; those that were
//! [refilled](crate::Parameters::refill), and those that began as random numbers, are written as they are.
//!
//! **Where a value belongs.** A tensor of a file is a `View`: a name, the whole parameter's shape, the indices of one dim that
//! a rank holds (tensor parallelism), and a range of the row-major values of these (ZeRO's slices of buckets). From two pieces
//! follow the runs of values that they have in common, so a rank of any other layout copies from the mapped files just what it needs.
//!
//! **What is set aside.** `step-000015.failed` holds weights with which a run has failed, and `step-000015.damaged` what had the name of
//! a checkpoint that was to be written and was none: neither is the latest, nor counts among those that are kept.
//!
//! **When it exists.** Files are written into a hidden folder beside the final one, synced, and the folder is renamed once the
//! manifest is in it. A folder without a valid manifest is not a checkpoint. A save waits for a copy of the values in the host's
//! memory only; a thread of each rank writes, and the ranks agree on the end of it between later steps. Of state and weights that are away
//! no copy is made: the save waits until they are written.

mod checkpoint;
mod export;
mod folder;
mod load;
mod manifest;
mod own_values;
mod rank_file;
mod rank_tensors;
mod saver;

pub use checkpoint::TrainingCheckpoint;
pub use folder::{checkpoints_in, set_aside_in};
pub use manifest::{CheckpointManifest, CheckpointNote, FileRecord, SavedLayout};
pub use saver::{CheckpointSaver, SaveOutcome, SetAside};
