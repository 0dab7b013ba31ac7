//! Folds a low-rank adapter into the model that it belongs to.

use std::collections::BTreeSet;

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_ops::linear_forward_add;

use super::free_space::{SpaceNeed, check_free_space};
use super::hf_save::HfSave;
use super::plan::{Content, PlannedTensor, SavePlan};
use super::save::Folder;
use super::save_failure::SaveFailure;
use crate::files::Checkpoint;
use crate::lora::{Adapter, file_name};

/// Writes the checkpoint `model` with W + s B A in place of the weight W of each layer of `adapter`, in the files' own type or
/// that of `save`; all else stays as it is. One tensor is in memory at a time. The sum is made in f32 and rounded once. The number of these layers.
///
/// # Errors
/// An adapter of another model, values that are NaN or infinite, and files that cannot be read or written; what is there stays then.
pub fn merge_adapter(model: &Checkpoint, adapter: &Adapter, save: &HfSave) -> Result<usize> {
    let modules = adapter.modules()?;
    check_layers(model, adapter, &modules)?;
    let modules: Vec<&str> = modules.iter().map(String::as_str).collect();
    let plan = |name: &String| {
        let entry = model.entry(name)?;
        let layer = name.strip_suffix(WEIGHT);
        let layer = layer.and_then(|layer| modules.binary_search(&layer).ok());
        // Constants that are no weights, as inv_freq, are never converted.
        let stored = model.dtype(name).ok();
        let asked = save.dtype.filter(|_| is_weight(name));
        let dtype = asked.or(stored).filter(|_| stored.is_some());
        Ok(PlannedTensor {
            name: name.clone(),
            shape: entry.shape.clone(),
            dtype: dtype.map_or(entry.dtype, Into::into),
            content: match (layer, dtype) {
                (Some(layer), Some(dtype)) => Content::Gathered(layer, dtype),
                _ => Content::Stored(name.clone(), dtype.filter(|_| dtype != stored)),
            },
        })
    };
    let tensors = model.tensors().keys().map(plan).collect::<Result<_>>()?;
    let plan = SavePlan::of_tensors(tensors, save.max_file_bytes);
    check_free_space(&[SpaceNeed {
        folder: save.output.path().to_path_buf(),
        num_bytes: save.num_bytes_of(&plan)?,
        what: "the model",
    }])?;
    let write = || -> std::result::Result<(), SaveFailure> {
        let folder = Folder::create(save, vec![model.dir(), adapter.weights().dir()])?;
        for file in &plan.files {
            let mut writer = folder.file(file)?;
            for tensor in &file.tensors {
                let merged = match tensor.content {
                    Content::Stored(..) => None,
                    Content::Gathered(layer, dtype) => {
                        let merged = merged(model, adapter, modules[layer], dtype);
                        Some(merged.map_err(SaveFailure::Weights)?)
                    }
                };
                writer.write(tensor, merged, Some(model))?;
            }
            writer.finish()?;
        }
        folder.finish(&plan)
    };
    write()?;
    Ok(modules.len())
}

const WEIGHT: &str = ".weight";
const BIAS: &str = ".bias";

/// Whether a tensor is a parameter of a layer by its name.
fn is_weight(name: &str) -> bool {
    name.ends_with(WEIGHT) || name.ends_with(BIAS)
}

/// An error if the model lacks a layer of the adapter.
fn check_layers(model: &Checkpoint, adapter: &Adapter, modules: &BTreeSet<String>) -> Result<()> {
    let is_missing = |module: &&String| !model.tensors().contains_key(&format!("{module}{WEIGHT}"));
    match modules.iter().find(is_missing) {
        None => Ok(()),
        Some(module) => bail!(
            "the adapter in {} is of the layer {module}, which the model in {} does not have\nhint: it belongs to another model",
            adapter.weights().dir().display(),
            model.dir().display()
        ),
    }
}

/// W + s B A of one layer.
fn merged(model: &Checkpoint, adapter: &Adapter, module: &str, dtype: DType) -> Result<Tensor> {
    let weight = format!("{module}{WEIGHT}");
    let shape = &model.entry(&weight)?.shape;
    let &[num_out, num_in] = shape.as_slice() else {
        bail!("tensor {weight} has shape {shape:?}; expected that of a linear layer, (out, in)");
    };
    let (file, rank) = (adapter.weights(), adapter.config().rank);
    let read = |from: &Checkpoint, name: &str, shape: [usize; 2]| {
        let values = from.read(name, &shape, None)?;
        if !values.iter().all(|value| value.is_finite()) {
            bail!(
                "tensor {name} in {} has values that are NaN or infinite: nothing was saved",
                from.dir().display()
            );
        }
        Tensor::from_vec(values, &shape, &Device::Cpu)
    };
    let a = read(
        file,
        &file_name(&format!("{module}.lora_A.weight")),
        [rank, num_in],
    )?;
    let b = read(
        file,
        &file_name(&format!("{module}.lora_B.weight")),
        [num_out, rank],
    )?;
    let a = a.t()?.contiguous()?; // (in, r)
    let b = (b * adapter.config().scale())?;
    let weight = read(model, &weight, [num_out, num_in])?;
    linear_forward_add(&weight, &b, &a)?.to_dtype(dtype)
}
