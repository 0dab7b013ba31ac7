//! Which tensor goes into which file, computed alike on every rank.

use std::collections::BTreeMap;

use candle_core::{DType, Result};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;

use crate::checkpoint::WEIGHTS_FILE;
use crate::lora::{ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, file_name, to_json};
use crate::params::{CatalogEntry, Parameters, ValuesFrom};

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
    /// Computed when it is to be written, in this type: an entry of the catalog, gathered from the ranks.
    Gathered(usize, DType),
    /// The tensor of this name in the source checkpoint, converted to this type, or as it is.
    Stored(String, Option<DType>),
}

impl PlannedTensor {
    fn new(name: String, entry: &CatalogEntry, dtype: DType, content: Content) -> Self {
        Self {
            name,
            shape: entry.shape.clone(),
            dtype: dtype.into(),
            content,
        }
    }

    pub fn num_bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

impl SavePlan {
    /// The parameters, or of a model with low-rank adapters these alone, in the one file that `peft` loads. `values_from` says of
    /// each entry of the catalog where its values are from.
    pub fn new(
        params: &Parameters,
        values_from: &[ValuesFrom],
        dtype: Option<DType>,
        max_file_bytes: usize,
    ) -> Result<Self> {
        let Some(lora) = params.lora() else {
            let tensors = tensors(params, values_from, dtype)?;
            return Ok(Self::of_tensors(tensors, max_file_bytes));
        };
        let config = to_json(lora, &params.adapted_layers())?;
        let adapters = params.catalog().iter().enumerate();
        let adapters = adapters.filter(|(_, entry)| entry.is_adapter);
        let adapters = adapters.map(|(index, entry)| {
            let dtype = dtype.unwrap_or(entry.stored_dtype);
            let content = Content::Gathered(index, dtype);
            PlannedTensor::new(file_name(&entry.name), entry, dtype, content)
        });
        let mut plan = Self::of_tensors(adapters.collect(), usize::MAX);
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
    /// What stands before the tensors: the length of a JSON object, and that with names, types, shapes and offsets.
    pub fn header(&self) -> Result<Vec<u8>> {
        let mut offset = 0;
        let info = |tensor: &PlannedTensor| {
            let start = offset;
            offset += tensor.num_bytes();
            let info = TensorInfo {
                dtype: tensor.dtype,
                shape: tensor.shape.clone(),
                data_offsets: (start, offset),
            };
            (tensor.name.clone(), info)
        };
        let tensors = self.tensors.iter().map(info).collect();
        let metadata = [("format".to_string(), "pt".to_string())].into();
        let header = safetensors::tensor::Metadata::new(Some(metadata), tensors)?;
        let mut header = serde_json::to_vec(&header).map_err(candle_core::Error::wrap)?;
        header.resize(header.len().next_multiple_of(8), b' ');
        let len = (header.len() as u64).to_le_bytes();
        Ok([len.as_slice(), &header].concat())
    }
}

fn tensors(
    params: &Parameters,
    values_from: &[ValuesFrom],
    dtype: Option<DType>,
) -> Result<Vec<PlannedTensor>> {
    let catalog = params.catalog();
    let parameter = |name: &str, index: usize| -> PlannedTensor {
        let entry = &catalog[index];
        let dtype = dtype.unwrap_or(entry.stored_dtype);
        let is_stored = params.checkpoint().is_some() && values_from[index] == ValuesFrom::Source;
        let converted = (dtype != entry.stored_dtype).then_some(dtype);
        let content = match is_stored {
            true => Content::Stored(entry.name.clone(), converted),
            false => Content::Gathered(index, dtype),
        };
        PlannedTensor::new(name.to_string(), entry, dtype, content)
    };
    let mut tensors = (0..catalog.len())
        .map(|index| parameter(&catalog[index].name, index))
        .collect::<Vec<_>>();
    let Some(checkpoint) = params.checkpoint() else {
        return Ok(tensors);
    };
    for (name, repeats) in params.extras() {
        let repeated = repeats.and_then(|of| catalog.iter().position(|entry| entry.name == of));
        tensors.push(match repeated {
            Some(index) => parameter(&name, index),
            None => {
                let entry = checkpoint.entry(&name)?;
                PlannedTensor {
                    shape: entry.shape.clone(),
                    dtype: entry.dtype,
                    content: Content::Stored(name.clone(), None),
                    name,
                }
            }
        });
    }
    Ok(tensors)
}
