//! Which tensor goes into which file, computed alike on every rank.

use std::collections::BTreeMap;

use candle_core::{DType, Result, bail};
use safetensors::Dtype;

use super::saved_model::{ParamRecord, SavedModel};
use super::tensor_file::header;
use crate::files::WEIGHTS_FILE;
use crate::lora::{ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, file_name, module_of, to_json};
use crate::params::SaveSource;

/// The files of a checkpoint to be written.
pub(super) struct SavePlan {
    pub files: Vec<PlannedFile>,
    /// The configuration of an adapter: name and content.
    pub config: Option<(String, Vec<u8>)>,
}

/// One safetensors file.
pub(super) struct PlannedFile {
    pub name: String,
    pub tensors: Vec<PlannedTensor>,
}

/// One tensor of a file.
pub(super) struct PlannedTensor {
    pub name: String,
    pub shape: Vec<usize>,
    pub dtype: Dtype,
    pub content: Content,
}

/// Where a tensor's bytes come from.
pub(super) enum Content {
    /// The values of the weight of this name, in this type.
    Values(String, DType),
    /// The tensor of this name in the source checkpoint, converted to this type, or as it is.
    Stored(String, Option<DType>),
}

impl PlannedTensor {
    /// The values of a parameter of a run, in its own type unless another one is given.
    fn values(name: String, param: &ParamRecord, dtype: Option<DType>) -> Result<Self> {
        let dtype = dtype.map_or_else(|| param.stored_dtype(), Ok)?;
        Ok(Self {
            name,
            shape: param.shape.clone(),
            dtype: dtype.into(),
            content: Content::Values(param.name.clone(), dtype),
        })
    }

    pub fn num_bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

impl SavePlan {
    /// The parameters, or of a model with low-rank adapters these alone, in the one file that `peft` loads.
    pub fn new(model: &SavedModel, dtype: Option<DType>, max_file_bytes: usize) -> Result<Self> {
        let Some(lora) = &model.lora else {
            let tensors = tensors(model, dtype)?;
            return Ok(Self::of_tensors(tensors, max_file_bytes));
        };
        let adapters = model.params.iter();
        let adapters = adapters.filter_map(|param| Some((module_of(&param.name)?, param)));
        let config = to_json(lora, &adapters.clone().map(|(module, _)| module).collect())?;
        let adapters =
            adapters.map(|(_, param)| PlannedTensor::values(file_name(&param.name), param, dtype));
        let mut plan = Self::of_tensors(adapters.collect::<Result<_>>()?, usize::MAX);
        for file in &mut plan.files {
            file.name = ADAPTER_WEIGHTS_FILE.to_string();
        }
        plan.config = Some((ADAPTER_CONFIG_FILE.to_string(), config));
        Ok(plan)
    }

    /// Tensors in name order, in files of at most `max_file_bytes` (but at least one tensor each).
    pub fn of_tensors(mut tensors: Vec<PlannedTensor>, max_file_bytes: usize) -> Self {
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        let mut files: Vec<Vec<PlannedTensor>> = vec![Vec::new()];
        let mut num_bytes = 0;
        for tensor in tensors {
            let is_full = num_bytes > 0 && num_bytes + tensor.num_bytes() > max_file_bytes;
            if is_full {
                files.push(Vec::new());
                num_bytes = 0;
            }
            num_bytes += tensor.num_bytes();
            if let Some(file) = files.last_mut() {
                file.push(tensor);
            }
        }
        let num_files = files.len();
        let name = |index: usize| match num_files {
            1 => WEIGHTS_FILE.to_string(),
            _ => format!("model-{:05}-of-{num_files:05}.safetensors", index + 1),
        };
        let files = files
            .into_iter()
            .enumerate()
            .map(|(index, tensors)| PlannedFile {
                name: name(index),
                tensors,
            });
        Self {
            files: files.collect(),
            config: None,
        }
    }

    /// The size of all files.
    pub fn num_bytes(&self) -> Result<u64> {
        let index = self.index().map(|index| serde_json::to_vec_pretty(&index));
        let index = index.transpose().map_err(candle_core::Error::wrap)?;
        let mut num_bytes = index.map_or(0, |text| text.len());
        num_bytes += self.config.as_ref().map_or(0, |(_, text)| text.len());
        for file in &self.files {
            num_bytes += file.header()?.len();
            num_bytes += file
                .tensors
                .iter()
                .map(PlannedTensor::num_bytes)
                .sum::<usize>();
        }
        Ok(num_bytes as u64)
    }

    /// The index of a checkpoint of several files; `None` for a single one.
    pub fn index(&self) -> Option<serde_json::Value> {
        if self.files.len() == 1 {
            return None;
        }
        let mut weight_map = BTreeMap::new();
        let mut total_size = 0;
        for file in &self.files {
            for tensor in &file.tensors {
                weight_map.insert(tensor.name.as_str(), file.name.as_str());
                total_size += tensor.num_bytes();
            }
        }
        Some(serde_json::json!({
            "metadata": { "total_size": total_size },
            "weight_map": weight_map,
        }))
    }
}

impl PlannedFile {
    /// What stands before the tensors.
    pub fn header(&self) -> Result<Vec<u8>> {
        let tensors = self.tensors.iter();
        let tensors = tensors.map(|it| (it.name.clone(), it.dtype, it.shape.clone()));
        header(tensors, [("format".to_string(), "pt".to_string())].into())
    }
}

fn tensors(model: &SavedModel, dtype: Option<DType>) -> Result<Vec<PlannedTensor>> {
    let parameter = |name: &str, param: &ParamRecord| {
        let mut tensor = PlannedTensor::values(name.to_string(), param, dtype)?;
        if model.source.is_some() && param.save_source == SaveSource::Source {
            let stored = param.stored_dtype()?;
            let converted = dtype.filter(|dtype| *dtype != stored);
            tensor.content = Content::Stored(param.name.clone(), converted);
        }
        Ok(tensor)
    };
    let params = model.params.iter();
    let tensors = params.clone().map(|param| parameter(&param.name, param));
    let mut tensors: Vec<PlannedTensor> = tensors.collect::<Result<_>>()?;
    for (name, repeats) in &model.extras {
        let mut params = params.clone();
        let repeated = params.find(|param| Some(&param.name) == repeats.as_ref());
        tensors.push(match (repeated, model.source) {
            (Some(param), _) => parameter(name, param)?,
            (None, None) => bail!("there is nothing to write for tensor {name}"),
            (None, Some(source)) => {
                let entry = source.entry(name)?;
                PlannedTensor {
                    name: name.clone(),
                    shape: entry.shape.clone(),
                    dtype: entry.dtype,
                    content: Content::Stored(name.clone(), None),
                }
            }
        });
    }
    Ok(tensors)
}
