//! Folds a low-rank adapter into the model that it belongs to.

use candle_core::Result;

use super::hf_save::HfSave;
use super::plan::{Content, PlannedTensor, SavePlan};
use super::save::save_rows;
use super::weights::{MergedModel, WEIGHT};
use crate::files::Checkpoint;
use crate::lora::Adapter;

/// Writes the checkpoint `model` with W + s B A in place of the weight W of each layer of `adapter`, in the files' own type or
/// that of `save`; all else stays as it is. One tensor is in memory at a time. The sum is made in f32 and rounded once. The number of these layers.
///
/// # Errors
/// An adapter of another model, values that are NaN or infinite, and files that cannot be read or written; what is there stays then.
pub fn merge_adapter(model: &Checkpoint, adapter: &Adapter, save: &HfSave) -> Result<usize> {
    let merged = MergedModel::new(model, adapter)?;
    let plan = |name: &String| {
        let entry = model.entry(name)?;
        // Constants that are no weights, as inv_freq, are never converted.
        let stored = model.dtype(name).ok();
        let asked = save.dtype.filter(|_| is_weight(name));
        let dtype = asked.or(stored).filter(|_| stored.is_some());
        Ok(PlannedTensor {
            name: name.clone(),
            shape: entry.shape.clone(),
            dtype: dtype.map_or(entry.dtype, Into::into),
            content: match (merged.is_changed(name), dtype) {
                (true, Some(dtype)) => Content::Values(name.clone(), dtype),
                _ => Content::Stored(name.clone(), dtype.filter(|_| dtype != stored)),
            },
        })
    };
    let tensors = model.tensors().keys().map(plan).collect::<Result<_>>()?;
    let plan = SavePlan::of_tensors(tensors, save.max_file_bytes);
    // Whole tensors: how many rows are multiplied together decides their last bits.
    let at_once = usize::MAX;
    save_rows(
        &merged,
        at_once,
        &plan,
        Some(model),
        save,
        &[adapter.weights().dir()],
    )?;
    Ok(merged.num_layers())
}

const BIAS: &str = ".bias";

/// Whether a tensor is a parameter of a layer by its name.
fn is_weight(name: &str) -> bool {
    name.ends_with(WEIGHT) || name.ends_with(BIAS)
}
