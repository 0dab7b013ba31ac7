//! Reads a file: its metadata, and its tensors as the weights of a model.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::path::{Path, PathBuf};

use candle_comm::message_of;
use candle_core::quantized::gguf_file::{Content, TensorInfo};
use candle_core::{Error, Result, bail};

use super::blocks::decode;
use super::metadata::GgufMetadata;
use super::tensor::RowChange;
use super::{GgmlDType, GgufContent, GgufTensor, type_name};
use crate::files::{Checkpoint, MappedFile};

/// A GGUF file, opened: mapped, and all but its tensors read.
pub struct GgufReader {
    path: PathBuf,
    map: MappedFile,
    content: Content,
    /// In the order of the file.
    tensors: Vec<GgufTensor>,
}

/// The form in which a file has the rows of a weight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoredRows {
    dtype: GgmlDType,
    change: RowChange,
}

impl StoredRows {
    /// The values of a weight of this shape.
    pub fn decode(self, bytes: &[u8], shape: &[usize]) -> Result<Vec<f32>> {
        let mut values = decode(self.dtype, bytes)?;
        self.change.undo(&mut values, shape);
        Ok(values)
    }
}

impl GgufReader {
    /// Opens the file.
    ///
    /// # Errors
    /// It cannot be read, is no GGUF, or is cut off.
    pub fn open(path: &Path) -> Result<Self> {
        let map = MappedFile::open(path)?;
        if !map.starts_with(b"GGUF") {
            bail!(
                "{} is no GGUF file: it does not begin with GGUF",
                path.display()
            );
        }
        let fail = |what: &str| {
            Error::msg(format!(
                "{} ({} bytes) is not a complete GGUF file: {what}\nhint: it may be cut off or damaged; fetch or export it again",
                path.display(),
                map.len()
            ))
        };
        if has_no_alignment(&map) {
            return Err(fail("general.alignment is 0"));
        }
        let content = match Content::read(&mut Cursor::new(&*map)) {
            Ok(content) => content,
            Err(err) => {
                let what = message_of(&err);
                let Some((_, number)) = what.split_once("unknown dtype for tensor ") else {
                    return Err(fail(&what));
                };
                bail!(
                    "{} has tensors of ggml's type number {number}, which candle does not read; it reads f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0 and the \
                     K-quants",
                    path.display()
                );
            }
        };
        let mut infos: Vec<_> = content.tensor_infos.iter().collect();
        infos.sort_by_key(|(_, info)| info.offset);
        let tensor = |(name, info): (&String, &TensorInfo)| GgufTensor {
            name: name.clone(),
            shape: info.shape.dims().to_vec(),
            dtype: info.ggml_dtype,
            content: GgufContent::Weight {
                name: name.clone(),
                change: RowChange::None,
            },
        };
        let tensors = infos.into_iter().map(tensor).collect();
        let reader = Self {
            path: path.to_path_buf(),
            map,
            content,
            tensors,
        };
        for tensor in &reader.tensors {
            reader.place(tensor)?;
        }
        Ok(reader)
    }

    /// What it says, by key.
    pub fn metadata(&self) -> GgufMetadata {
        let mut metadata = GgufMetadata::default();
        let sorted: BTreeMap<_, _> = self.content.metadata.iter().collect();
        for (key, value) in sorted {
            metadata.set(key, value.clone());
        }
        metadata
    }

    /// Its tensors in the order of the file, as they are there.
    pub fn tensors(&self) -> &[GgufTensor] {
        &self.tensors
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&GgufTensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// The values of a tensor.
    ///
    /// # Errors
    /// There is none of this name.
    pub fn values(&self, name: &str) -> Result<Vec<f32>> {
        let Some(tensor) = self.tensor(name) else {
            bail!("there is no tensor {name} in {}", self.path.display());
        };
        let place = self.place(tensor)?;
        decode(tensor.dtype, &self.map[place])
    }

    /// Where a tensor's bytes are.
    fn place(&self, tensor: &GgufTensor) -> Result<std::ops::Range<usize>> {
        let offset = self.content.tensor_infos[&tensor.name].offset;
        let start = self.content.tensor_data_offset.saturating_add(offset);
        let (block, size) = (tensor.dtype.block_size(), tensor.dtype.type_size());
        let mut dims = tensor.shape.iter();
        let values = dims.try_fold(1usize, |product, dim| product.checked_mul(*dim));
        let len = values.filter(|_| tensor.width().is_multiple_of(block));
        let len = len.and_then(|len| (len / block).checked_mul(size));
        let end = len.and_then(|len| usize::try_from(start).ok()?.checked_add(len));
        match end {
            Some(end) if end <= self.map.len() => Ok(start as usize..end),
            _ => bail!(
                "{} ({} bytes) is not a complete GGUF file: tensor {} of shape {:?} and type {} at byte {start} goes beyond its end, or has no whole \
                 blocks\nhint: it may be cut off or damaged; fetch or export it again",
                self.path.display(),
                self.map.len(),
                tensor.name,
                tensor.shape,
                type_name(tensor.dtype)
            ),
        }
    }

    /// Its tensors as weights by their names in the model: those that `tensors` list, as they would be written. Values are decoded when
    /// they are read.
    ///
    /// # Errors
    /// One that is missing, or has another shape.
    pub fn into_checkpoint(self, tensors: &[GgufTensor]) -> Result<Checkpoint> {
        let mut weights = BTreeMap::new();
        for tensor in tensors {
            let GgufContent::Weight { name, change } = &tensor.content else {
                continue;
            };
            let Some(stored) = self.tensor(&tensor.name) else {
                bail!(
                    "{} has no tensor {}, which its metadata ask for",
                    self.path.display(),
                    tensor.name
                );
            };
            if stored.shape != tensor.shape {
                bail!(
                    "tensor {} in {} has shape {:?}; expected {:?} from the metadata",
                    tensor.name,
                    self.path.display(),
                    stored.shape,
                    tensor.shape
                );
            }
            let rows = StoredRows {
                dtype: stored.dtype,
                change: *change,
            };
            let place = self.place(stored)?;
            weights.insert(name.clone(), (stored.shape.clone(), rows, place));
        }
        Ok(Checkpoint::of_stored_rows(self.path, self.map, weights))
    }
}

/// Whether a file says that tensors begin at multiples of nothing, by which candle would divide.
fn has_no_alignment(bytes: &[u8]) -> bool {
    const KEY: &[u8] = b"general.alignment";
    /// What is said before lists of tokens.
    const NEAR: usize = 4 << 20;
    let near = &bytes[..bytes.len().min(NEAR)];
    let places = near.windows(KEY.len()).enumerate();
    let mut places = places.filter(|(_, window)| *window == KEY);
    places.any(|(place, _)| {
        // The type of the value, and the value, of 32 or 64 bits.
        let value = bytes.get(place + KEY.len() + 4..).unwrap_or_default();
        value.len() >= 4 && value[..4] == [0; 4]
    })
}
