//! Reads a file: its metadata, and its tensors.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufReader, Read, Seek};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{Content, TensorInfo};
use candle_core::{Error, Result, bail};

use super::blocks::{decode, message_of, type_name};
use super::metadata::GgufMetadata;
use super::tensor::{GgufContent, GgufTensor, RowChange};

/// A GGUF file, opened: all but its tensors read.
pub struct GgufReader {
    path: PathBuf,
    file: File,
    /// Its length when it was opened.
    len: usize,
    content: Content,
    /// In the order of the file.
    tensors: Vec<GgufTensor>,
}

impl GgufReader {
    /// Opens the file.
    ///
    /// # Errors
    /// It cannot be read, is no GGUF, or is cut off.
    pub fn open(path: &Path) -> Result<Self> {
        let cannot_read =
            |err: io::Error| Error::msg(format!("cannot read {}: {err}", path.display()));
        // To open a pipe would wait for one that writes.
        if !fs::metadata(path).map_err(cannot_read)?.is_file() {
            bail!(
                "cannot read {}: expected a file, got a folder, a pipe or a device",
                path.display()
            );
        }
        let file = File::open(path).map_err(cannot_read)?;
        let len = file.metadata().map_err(cannot_read)?.len() as usize;
        let mut begin = Vec::new();
        let read = (&file).take(NEAR + VALUE).read_to_end(&mut begin);
        read.map_err(cannot_read)?;
        if !begin.starts_with(b"GGUF") {
            bail!(
                "{} is no GGUF file: it does not begin with GGUF",
                path.display()
            );
        }
        let fail = |what: &str| {
            Error::msg(format!(
                "{} ({} bytes) is not a complete GGUF file: {what}\nhint: it may be cut off or damaged; fetch or export it again",
                path.display(),
                len
            ))
        };
        if has_no_alignment(&begin) {
            return Err(fail("general.alignment is 0"));
        }
        let mut from_start = BufReader::new(&file);
        from_start.rewind().map_err(cannot_read)?;
        let content = match Content::read(&mut from_start) {
            Ok(content) => content,
            Err(err) => {
                let what = message_of(err);
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
            file,
            len,
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
        let mut bytes = vec![0; place.len()];
        if let Err(err) = self.file.read_exact_at(&mut bytes, place.start as u64) {
            bail!("cannot read {}: {err}", self.path.display());
        }
        decode(tensor.dtype, &bytes)
    }

    /// Where the bytes of a tensor are.
    ///
    /// # Errors
    /// Beyond the end of the file.
    fn place(&self, tensor: &GgufTensor) -> Result<Range<usize>> {
        let offset = self.content.tensor_infos[&tensor.name].offset;
        let start = self.content.tensor_data_offset.saturating_add(offset);
        let (block, size) = (tensor.dtype.block_size(), tensor.dtype.type_size());
        let mut dims = tensor.shape.iter();
        let values = dims.try_fold(1usize, |product, dim| product.checked_mul(*dim));
        let len = values.filter(|_| tensor.width().is_multiple_of(block));
        let len = len.and_then(|len| (len / block).checked_mul(size));
        let end = len.and_then(|len| usize::try_from(start).ok()?.checked_add(len));
        match end {
            Some(end) if end <= self.len => Ok(start as usize..end),
            _ => bail!(
                "{} ({} bytes) is not a complete GGUF file: tensor {} of shape {:?} and type {} at byte {start} goes beyond its end, or has no whole \
                 blocks\nhint: it may be cut off or damaged; fetch or export it again",
                self.path.display(),
                self.len,
                tensor.name,
                tensor.shape,
                type_name(tensor.dtype)
            ),
        }
    }
}

/// Bytes of a file in which keys are looked for first: what is said before lists of tokens.
const NEAR: u64 = 4 << 20;

/// Bytes behind them: a key that begins before that border is whole, and so is its value.
const VALUE: u64 = 64;

/// Whether the begin of a file says that tensors begin at multiples of nothing, by which candle would divide.
fn has_no_alignment(bytes: &[u8]) -> bool {
    const KEY: &[u8] = b"general.alignment";
    let places = bytes.windows(KEY.len()).enumerate();
    let mut places = places.filter(|(_, window)| *window == KEY);
    places.any(|(place, _)| {
        // The type of the value, and the value, of 32 or 64 bits.
        let value = bytes.get(place + KEY.len() + 4..).unwrap_or_default();
        value.len() >= 4 && value[..4] == [0; 4]
    })
}
