//! What a run begins with: the weights of a checkpoint, or random ones.

pub(crate) mod adapter_base;
pub(crate) mod builder;
pub(crate) mod finetune;
pub(crate) mod pretrain;

use std::fmt::Debug;
use std::path::{Path, PathBuf};

use candle_comm::{Degrees, Mesh, ProcessGroup};
use candle_core::{Device, Result};
use candle_parallel::{ModelPart, ParamStore};
use candle_train_models::{CausalLm, ModelConfig};
use candle_trainer::Tokenizer;
use clap::Args;
use serde::Serialize;
use toml::Table;

use crate::args::data::DataArgs;
use crate::args::lora::LoraArgs;
use crate::run::Run;
use crate::spec::RunSpec;

/// What a run begins with: the weights of a checkpoint, or random ones.
pub trait Start: Args + Clone + Debug + Serialize + Send + Sync {
    /// The subcommand of `candle-train`.
    const COMMAND: &'static str;

    /// Values of flags that have other defaults here than they say.
    fn defaults() -> Table;

    /// Without what may differ between ranks: where a host has its files.
    fn shared(&self) -> Self;

    /// What is trained beside the weights, if not these themselves.
    fn adapters(&self) -> LoraArgs {
        LoraArgs::default()
    }

    /// What else there is to do, in words after a hint, about sequences of `seq_len` tokens that are longer than the model takes.
    fn longer(&self, config: &ModelConfig, seq_len: usize) -> String;

    /// The model, before anything is known of its tokens. Unless it `needs_weights`, these need not be there, and none are fetched.
    ///
    /// # Errors
    /// A model that is not there, or of a kind that cannot be trained.
    fn model(run: &Run<Self>, needs_weights: bool) -> Result<StartModel>;

    /// The tokenizer, with which `model` becomes what is trained; `None` if a model without weights has none either. `is_first` shows what it
    /// takes long to do.
    ///
    /// # Errors
    /// A tokenizer that cannot be read, or trained on the data.
    fn tokenizer(
        run: &Run<Self>,
        model: &mut StartModel,
        is_first: bool,
    ) -> Result<Option<Tokenizer>>;

    /// What is trained on what, in words.
    fn title(&self, data: &DataArgs, model: &StartModel) -> String;
}

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

/// Where a run begins.
#[derive(Clone)]
pub(crate) enum InitialWeights {
    Random,
    /// A folder.
    Checkpoint(PathBuf),
}

impl InitialWeights {
    /// The folder that they are in.
    pub fn folder(&self) -> Option<&Path> {
        match self {
            Self::Random => None,
            Self::Checkpoint(dir) => Some(dir),
        }
    }

    /// The model's parameters, of which the flags freeze some or train others beside them.
    pub fn store(&self, spec: &RunSpec, base_model: Option<&str>) -> Result<ParamStore> {
        let seed = spec.training.batches.seed;
        let store = match self {
            Self::Random => ParamStore::init(seed),
            Self::Checkpoint(model) => ParamStore::from_pretrained(model)?,
        };
        let store = spec.training.optimizer.freeze.apply(store);
        spec.lora.apply(store, seed, base_model)
    }

    /// The whole model without values: weights that are not those of which its configuration tells, and adapters that do not fit them, are
    /// errors, although none is read.
    pub fn whole(&self, spec: &RunSpec, base_model: Option<&str>) -> Result<ModelPart> {
        let store = self.store(spec, base_model)?.without_values();
        let mesh = Mesh::new(ProcessGroup::single(Device::Cpu), Degrees::default())?;
        let dtype = spec.training.layout.dtype();
        let vb = store.builder(dtype, &Device::Cpu);
        CausalLm::part(&spec.config, &mesh, &vb)
    }
}
