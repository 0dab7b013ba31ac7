//! Where the initial values of parameters come from.

use candle_core::{DType, Result, Shape, bail};
use candle_nn::Init;
use rayon::prelude::*;

use super::init::init_values;
use crate::agreement::Facts;
use crate::files::Checkpoint;
use crate::lora::{Adapter, LoraConfig, file_name};
use crate::placement::Shard;

/// The source of a model's parameters, and that of its adapters if it has some.
pub(crate) struct Source {
    pub base: BaseSource,
    pub lora: Option<LoraSource>,
}

/// The source of all parameters but adapters.
pub(crate) enum BaseSource {
    Init { seed: u64 },
    Pretrained(Checkpoint),
}

/// The source of adapters.
pub(crate) enum LoraSource {
    Init(LoraConfig),
    Trained(Adapter),
}

/// A rank's part of a parameter.
#[derive(Clone, Copy)]
pub(crate) struct Wanted<'a> {
    pub name: &'a str,
    pub shape: &'a Shape,
    pub shard: Option<&'a Shard>,
    /// Its distribution if it is drawn at random.
    pub init: Init,
    pub is_adapter: bool,
}

impl LoraSource {
    pub fn config(&self) -> &LoraConfig {
        match self {
            Self::Init(config) => config,
            Self::Trained(adapter) => adapter.config(),
        }
    }
}

impl Source {
    /// The checkpoint of the model without its adapters.
    pub fn checkpoint(&self) -> Option<&Checkpoint> {
        match &self.base {
            BaseSource::Init { .. } => None,
            BaseSource::Pretrained(checkpoint) => Some(checkpoint),
        }
    }

    /// The seed of adapters, or of parameters that are drawn; 0 without any.
    pub fn seed(&self) -> u64 {
        match (self.lora(), &self.base) {
            (Some(lora), _) => lora.seed,
            (None, BaseSource::Init { seed }) => *seed,
            (None, BaseSource::Pretrained(_)) => 0,
        }
    }

    /// What adapters the model has.
    pub fn lora(&self) -> Option<&LoraConfig> {
        self.lora.as_ref().map(LoraSource::config)
    }

    /// The values in f32, row-major. Values of a file that are NaN or infinite are an error.
    pub fn values(&self, wanted: &Wanted<'_>) -> Result<Vec<f32>> {
        match (self.file(wanted), &self.base, &self.lora) {
            (Some((checkpoint, name)), ..) => read(checkpoint, &name, wanted),
            (None, _, Some(LoraSource::Init(lora))) if wanted.is_adapter => draw(lora.seed, wanted),
            (None, BaseSource::Init { seed }, _) => draw(*seed, wanted),
            (None, ..) => bail!("parameter {} comes from nowhere", wanted.name),
        }
    }

    /// The type in which the values are stored and are to be stored again; that of random ones is `dtype`, of new adapters f32.
    pub fn stored_dtype(&self, wanted: &Wanted<'_>, dtype: DType) -> Result<DType> {
        match self.file(wanted) {
            Some((checkpoint, name)) => checkpoint.dtype_of(&name, wanted.shape.dims()),
            None if wanted.is_adapter => Ok(DType::F32),
            None => Ok(dtype),
        }
    }

    /// Whether the values are drawn at random.
    pub fn is_drawn(&self, wanted: &Wanted<'_>) -> bool {
        self.file(wanted).is_none()
    }

    /// What ranks must say alike of where their weights come from.
    pub fn facts(&self) -> Result<Facts> {
        let base = match &self.base {
            BaseSource::Init { seed } => format!("seed {seed}"),
            BaseSource::Pretrained(checkpoint) => {
                format!("a checkpoint with digest {:016x}", checkpoint.digest()?)
            }
        };
        let lora = match &self.lora {
            None => "none".to_string(),
            Some(LoraSource::Init(lora)) => format!(
                "{:?}",
                LoraConfig {
                    base_model: None,
                    ..lora.clone()
                }
            ),
            Some(LoraSource::Trained(adapter)) => {
                format!(
                    "an adapter with digest {:016x}",
                    adapter.weights().digest()?
                )
            }
        };
        let mut facts = Facts::default();
        facts.add("the source of the weights", base);
        facts.add("the source of the adapters", lora);
        Ok(facts)
    }

    /// The file that has the values, and their name there.
    fn file(&self, wanted: &Wanted<'_>) -> Option<(&Checkpoint, String)> {
        match (&self.lora, wanted.is_adapter) {
            (Some(LoraSource::Trained(adapter)), true) => {
                Some((adapter.weights(), file_name(wanted.name)))
            }
            (_, true) => None,
            (_, false) => Some((self.checkpoint()?, wanted.name.to_string())),
        }
    }
}

fn draw(seed: u64, wanted: &Wanted<'_>) -> Result<Vec<f32>> {
    init_values(seed, wanted.name, wanted.shape, wanted.shard, wanted.init)
}

fn read(checkpoint: &Checkpoint, name: &str, wanted: &Wanted<'_>) -> Result<Vec<f32>> {
    let values = checkpoint.read(name, wanted.shape.dims(), wanted.shard)?;
    if !values.par_iter().all(|value| value.is_finite()) {
        bail!(
            "tensor {name} in {} has values that are NaN or infinite\nhint: the file was damaged, or the training that wrote it \
             had diverged",
            checkpoint.dir().display()
        );
    }
    Ok(values)
}
