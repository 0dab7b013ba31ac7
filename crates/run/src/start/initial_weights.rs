//! The weights that a run begins with.

use std::path::{Path, PathBuf};

use candle_comm::{Degrees, Mesh, ProcessGroup};
use candle_core::{Device, Result};
use candle_parallel::{ModelPart, ParamStore};
use candle_train_models::CausalLm;

use crate::spec::RunSpec;

/// The weights that a run begins with.
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
