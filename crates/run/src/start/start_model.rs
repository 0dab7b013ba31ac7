//! The model that a run begins with.

use std::path::PathBuf;

use candle_train_models::ModelConfig;

use crate::start::initial_weights::InitialWeights;

/// The model that a run begins with.
pub struct StartModel {
    pub(crate) config: ModelConfig,
    /// The folder of its tokenizer and chat template, if it has one.
    pub(crate) dir: Option<PathBuf>,
    pub(crate) weights: InitialWeights,
    /// As its user calls it.
    pub(crate) name: Option<String>,
    /// Files beside the weights.
    pub(crate) sidecars: Vec<(String, Vec<u8>)>,
    /// Files and folders that are read.
    pub(crate) inputs: Vec<PathBuf>,
}
