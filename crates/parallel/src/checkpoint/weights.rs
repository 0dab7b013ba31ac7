//! Models whose weights are read by rows: those of a folder, of a training checkpoint, and with an adapter folded in.

use std::collections::BTreeSet;
use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_gguf::Weights;
use candle_ops::linear_forward_add;

use super::training::TrainingCheckpoint;
use crate::files::Checkpoint;
use crate::lora::{Adapter, file_name};

/// Offsets of rows.
fn offsets(shape: &[usize], rows: Range<usize>) -> Range<usize> {
    let width = shape.last().copied().unwrap_or(1);
    rows.start * width..rows.end * width
}

impl Weights for Checkpoint {
    fn names(&self) -> Vec<String> {
        self.tensors().keys().cloned().collect()
    }

    fn dtype(&self, name: &str) -> Result<DType> {
        Self::dtype(self, name)
    }

    fn rows(&self, name: &str, shape: &[usize], rows: Range<usize>) -> Result<Vec<f32>> {
        self.read_range(name, shape, offsets(shape, rows))
    }
}

/// The model of a run's checkpoint.
pub struct CheckpointWeights<'a> {
    /// The checkpoint.
    pub checkpoint: &'a TrainingCheckpoint,
    /// The model with which the run began, for what was not trained.
    pub source: Option<&'a Checkpoint>,
}

impl Weights for CheckpointWeights<'_> {
    fn names(&self) -> Vec<String> {
        let params = self.checkpoint.manifest().params.iter();
        params.map(|param| param.name.clone()).collect()
    }

    fn dtype(&self, name: &str) -> Result<DType> {
        let mut params = self.checkpoint.manifest().params.iter();
        match params.find(|param| param.name == name) {
            Some(param) => param.stored_dtype(),
            None => bail!(
                "the checkpoint {} has no parameter {name}",
                self.checkpoint.dir().display()
            ),
        }
    }

    fn rows(&self, name: &str, shape: &[usize], rows: Range<usize>) -> Result<Vec<f32>> {
        self.checkpoint
            .read_range(name, shape, offsets(shape, rows), self.source)
    }
}

/// A model with a low-rank adapter folded in: W + s B A in place of the weight W of each of its layers (arXiv:2106.09685), summed in f32.
pub struct MergedModel<'a> {
    model: &'a Checkpoint,
    adapter: &'a Adapter,
    modules: BTreeSet<String>,
}

pub(super) const WEIGHT: &str = ".weight";

impl<'a> MergedModel<'a> {
    /// The two together.
    ///
    /// # Errors
    /// A layer of the adapter that the model does not have.
    pub fn new(model: &'a Checkpoint, adapter: &'a Adapter) -> Result<Self> {
        let modules = adapter.modules()?;
        let is_missing =
            |module: &&String| !model.tensors().contains_key(&format!("{module}{WEIGHT}"));
        match modules.iter().find(is_missing) {
            None => Ok(Self {
                model,
                adapter,
                modules,
            }),
            Some(module) => bail!(
                "the adapter in {} is of the layer {module}, which the model in {} does not have\nhint: it belongs to another model",
                adapter.weights().dir().display(),
                model.dir().display()
            ),
        }
    }

    /// Layers of the adapter.
    pub fn num_layers(&self) -> usize {
        self.modules.len()
    }

    /// Whether this is the weight of one of them.
    pub fn is_changed(&self, name: &str) -> bool {
        let module = name.strip_suffix(WEIGHT);
        module.is_some_and(|module| self.modules.contains(module))
    }
}

impl Weights for MergedModel<'_> {
    fn names(&self) -> Vec<String> {
        self.model.names()
    }

    fn dtype(&self, name: &str) -> Result<DType> {
        self.model.dtype(name)
    }

    fn rows(&self, name: &str, shape: &[usize], rows: Range<usize>) -> Result<Vec<f32>> {
        let of_model = self.model.rows(name, shape, rows.clone())?;
        let module = name.strip_suffix(WEIGHT);
        let Some(module) = module.filter(|module| self.modules.contains(*module)) else {
            return Ok(of_model);
        };
        let &[num_out, num_in] = shape else {
            bail!("tensor {name} has shape {shape:?}; expected that of a linear layer, (out, in)");
        };
        let (file, config) = (self.adapter.weights(), self.adapter.config());
        let read = |matrix: &str, shape: [usize; 2], rows: Range<usize>| {
            let name = file_name(&format!("{module}.lora_{matrix}.weight"));
            let len = rows.len();
            let values = finite(file.rows(&name, &shape, rows)?, &name, file)?;
            Tensor::from_vec(values, (len, shape[1]), &Device::Cpu)
        };
        let a = read("A", [config.rank, num_in], 0..config.rank)?;
        let b = read("B", [num_out, config.rank], rows.clone())?;
        let a = a.t()?.contiguous()?; // (in, r)
        let b = (b * config.scale())?;
        let of_model = finite(of_model, name, self.model)?;
        let weight = Tensor::from_vec(of_model, (rows.len(), num_in), &Device::Cpu)?;
        linear_forward_add(&weight, &b, &a)?
            .flatten_all()?
            .to_vec1()
    }
}

/// An error if values of a file are none.
fn finite(values: Vec<f32>, name: &str, file: &Checkpoint) -> Result<Vec<f32>> {
    if !values.iter().all(|value| value.is_finite()) {
        bail!(
            "tensor {name} in {} has values that are NaN or infinite: nothing was saved",
            file.dir().display()
        );
    }
    Ok(values)
}
