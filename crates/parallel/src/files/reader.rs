//! Reads parts of tensors straight from memory-mapped safetensors files.

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Result, bail};
use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::{Dtype, SafeTensors};
use twox_hash::XxHash64;

use super::mapped_file::MappedFile;
use super::plain_file::read_text_file;
use crate::placement::Shard;
use crate::view::{ValueRun, View};

/// Name of the single weights file of a Hugging Face checkpoint.
pub const WEIGHTS_FILE: &str = "model.safetensors";
/// Name of the index of a sharded Hugging Face checkpoint.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// A Hugging Face checkpoint folder, opened: every file mapped, every header checked, no weight read yet.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    maps: Vec<(PathBuf, MappedFile)>,
    tensors: BTreeMap<String, TensorEntry>,
    /// Second names: (name, second name).
    aliases: Mutex<BTreeMap<String, String>>,
    num_read_bytes: Arc<AtomicU64>,
}

/// Where a tensor lies in a checkpoint.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TensorEntry {
    /// Global shape.
    pub shape: Vec<usize>,
    /// Storage type.
    pub dtype: Dtype,
    file: usize,
    start: usize,
    end: usize,
}

impl TensorEntry {
    /// Size in the file.
    pub fn num_bytes(&self) -> usize {
        self.end - self.start
    }

    /// Number of its values.
    pub fn num_values(&self) -> usize {
        self.shape.iter().product()
    }
}

#[derive(serde::Deserialize)]
struct WeightIndex {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens `dir`, which holds `model.safetensors` or `model.safetensors.index.json` and the files that it names.
    ///
    /// Errors name the file and what is wrong with it: missing, truncated, not safetensors, or at odds with the index.
    ///
    /// # Errors
    /// What is wrong with which file.
    pub fn open(dir: &Path) -> Result<Self> {
        if !dir.is_dir() {
            bail!("checkpoint folder {} does not exist", dir.display());
        }
        let mut checkpoint = Self::empty(dir);
        // A link to nothing is there, too, and told by who opens it.
        let is_there = |name| dir.join(name).symlink_metadata().is_ok();
        if is_there(WEIGHTS_FILE) {
            checkpoint.map_file(&dir.join(WEIGHTS_FILE))?;
        } else if is_there(INDEX_FILE) {
            checkpoint.map_index(&dir.join(INDEX_FILE))?;
        } else {
            bail!(
                "{} has neither {WEIGHTS_FILE} nor {INDEX_FILE}\nhint: only safetensors weights are read; convert \
                 pytorch_model.bin files first",
                dir.display()
            );
        }
        Ok(checkpoint)
    }

    /// Opens one file of `dir`, whatever its name.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_file(dir: &Path, name: &str) -> Result<Self> {
        let mut checkpoint = Self::empty(dir);
        checkpoint.map_file(&dir.join(name))?;
        Ok(checkpoint)
    }

    fn empty(dir: &Path) -> Self {
        Self {
            dir: dir.to_path_buf(),
            maps: Vec::new(),
            tensors: BTreeMap::new(),
            aliases: Mutex::default(),
            num_read_bytes: Arc::default(),
        }
    }

    fn map_index(&mut self, path: &Path) -> Result<()> {
        let text = read_text_file(path).map_err(|err| {
            candle_core::Error::msg(format!("cannot read {}: {err}", path.display()))
        })?;
        let index: WeightIndex = serde_json::from_str(&text).map_err(|err| {
            candle_core::Error::msg(format!(
                "{} is not a safetensors index: {err}",
                path.display()
            ))
        })?;
        let mut files: Vec<&String> = index.weight_map.values().collect();
        files.sort();
        files.dedup();
        for file in files {
            let is_plain = Path::new(file).components().count() == 1 && !file.starts_with('.');
            if !is_plain {
                bail!(
                    "{} names the file {file:?}; expected plain file names in the same folder",
                    path.display()
                );
            }
            let shard_path = self.dir.join(file);
            if shard_path.symlink_metadata().is_err() {
                bail!(
                    "{} names {file}, which does not exist in {}\nhint: the download may be incomplete",
                    path.display(),
                    self.dir.display()
                );
            }
            self.map_file(&shard_path)?;
        }
        for (name, file) in &index.weight_map {
            let found = self.tensors.get(name).map(|entry| &self.maps[entry.file].0);
            if found.and_then(|path| path.file_name()) != Some(file.as_ref()) {
                bail!(
                    "{} says that tensor {name} is in {file}, but it is not",
                    path.display()
                );
            }
        }
        Ok(())
    }

    fn map_file(&mut self, path: &Path) -> Result<()> {
        let map = MappedFile::open(path)?;
        let fail = |err: &dyn std::fmt::Display| {
            candle_core::Error::msg(format!(
                "{} ({} bytes) is not a complete safetensors file: {err}\nhint: the file may be truncated or corrupt; \
                 fetch it again",
                path.display(),
                map.len()
            ))
        };
        let tensors = SafeTensors::deserialize(&map).map_err(|err| fail(&err))?;
        let file = self.maps.len();
        let base = map.as_ptr() as usize;
        for (name, view) in tensors.iter() {
            let start = view.data().as_ptr() as usize - base;
            let entry = TensorEntry {
                shape: view.shape().to_vec(),
                dtype: view.dtype(),
                file,
                start,
                end: start + view.data().len(),
            };
            if let Some(earlier) = self.tensors.insert(name.to_string(), entry) {
                bail!(
                    "tensor {name} is in both {} and {}",
                    self.maps[earlier.file].0.display(),
                    path.display()
                );
            }
        }
        self.maps.push((path.to_path_buf(), map));
        Ok(())
    }

    /// Counts the bytes of which [`Self::read`] has made values: to show how far a program is that reads a model.
    pub fn num_read_bytes(&self) -> Arc<AtomicU64> {
        self.num_read_bytes.clone()
    }

    /// The folder that was opened.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Takes the tensor `alias` for `name` where there is none of that name: a tied pair that was written once.
    pub fn allow_alias(&self, alias: &str, name: &str) {
        let mut aliases = self.aliases.lock().unwrap_or_else(PoisonError::into_inner);
        aliases.insert(name.to_string(), alias.to_string());
    }

    /// How many files the tensors are in.
    pub fn num_files(&self) -> usize {
        self.maps.len()
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> &BTreeMap<String, TensorEntry> {
        &self.tensors
    }

    /// The bytes of a tensor as they are in the file.
    ///
    /// # Errors
    /// There is no such tensor.
    pub fn bytes(&self, name: &str) -> Result<&[u8]> {
        let entry = self.entry(name)?;
        Ok(&self.maps[entry.file].1[entry.start..entry.end])
    }

    /// A hash of every tensor's name, type, shape, and some of its bytes: another one for other weights, unless they differ where
    /// nobody looked. To read whole files would take minutes.
    pub(crate) fn digest(&self) -> Result<u64> {
        /// From the start, the middle and the end of a tensor.
        const BYTES: usize = 64;
        let mut hasher = XxHash64::default();
        for (name, entry) in &self.tensors {
            (name, format!("{:?}", entry.dtype), &entry.shape).hash(&mut hasher);
            let bytes = self.bytes(name)?;
            let last = bytes.len().saturating_sub(BYTES);
            for start in [0, last / 2, last] {
                hasher.write(&bytes[start..bytes.len().min(start + BYTES)]);
            }
        }
        Ok(hasher.finish())
    }

    /// Where tensor `name` lies, or its [alias](Self::allow_alias); an error that suggests similar names if it is
    /// nowhere.
    ///
    /// # Errors
    /// There is no such tensor.
    pub fn entry(&self, name: &str) -> Result<&TensorEntry> {
        let aliases = self.aliases.lock().unwrap_or_else(PoisonError::into_inner);
        let by_alias = || self.tensors.get(aliases.get(name)?);
        let Some(entry) = self.tensors.get(name).or_else(by_alias) else {
            bail!(
                "tensor {name} is missing from the checkpoint in {} ({} tensors){}",
                self.dir.display(),
                self.tensors.len(),
                self.similar(name)
            );
        };
        Ok(entry)
    }

    fn similar(&self, name: &str) -> String {
        let last = name.rsplit('.').take(2).collect::<Vec<_>>();
        let matches = |other: &&String| other.rsplit('.').take(2).collect::<Vec<_>>() == last;
        match self.tensors.keys().find(matches) {
            Some(other) => format!("\nhint: it does have {other}"),
            None => String::new(),
        }
    }

    /// The type that a tensor is stored in, if it is one that can be trained: f32, f16 or bf16.
    ///
    /// # Errors
    /// There is no such tensor, or it has another type.
    pub fn dtype(&self, name: &str) -> Result<DType> {
        match self.entry(name)?.dtype {
            Dtype::F32 => Ok(DType::F32),
            Dtype::F16 => Ok(DType::F16),
            Dtype::BF16 => Ok(DType::BF16),
            other => bail!(
                "tensor {name} in {} is stored as {other:?}; expected F32, F16 or BF16",
                self.dir.display()
            ),
        }
    }

    /// As [`Self::dtype`], and an error unless the tensor has this global shape.
    pub(crate) fn dtype_of(&self, name: &str, shape: &[usize]) -> Result<DType> {
        let entry = self.entry(name)?;
        if entry.shape != shape {
            bail!(
                "tensor {name} in {} has shape {:?}; expected {shape:?} from the configuration",
                self.maps[entry.file].0.display(),
                entry.shape
            );
        }
        self.dtype(name)
    }

    /// The rank's part of a tensor, converted to f32, row-major. Only the bytes of the part are touched.
    ///
    /// # Errors
    /// There is no such tensor, or it has another shape or type.
    pub fn read(&self, name: &str, shape: &[usize], shard: Option<&Shard>) -> Result<Vec<f32>> {
        let dtype = self.dtype_of(name, shape)?;
        let bytes = self.bytes(name)?;
        let mut view = View::of_whole(name, shape, 0..shape.iter().product());
        if let Some(shard) = shard {
            let width = shape.get(shard.dim()).copied().unwrap_or(1).max(1);
            view.range = 0..view.len() / width * shard.len();
            (view.dim, view.held) = (shard.dim(), shard.held().clone());
        }
        let mut values = vec![0f32; view.len()];
        let size = dtype.size_in_bytes();
        let mut rest = values.as_mut_slice();
        let runs = view.runs().map(|ValueRun { global, local }| {
            let (run, behind) = std::mem::take(&mut rest).split_at_mut(local.len());
            rest = behind;
            (&bytes[global.start * size..global.end * size], run)
        });
        let runs: Vec<(&[u8], &mut [f32])> = runs.collect();
        runs.into_par_iter()
            .for_each(|(bytes, values)| decode(dtype, bytes, values));
        let num_bytes = (values.len() * size) as u64;
        self.num_read_bytes.fetch_add(num_bytes, Ordering::Relaxed);
        Ok(values)
    }

    /// The values of a tensor of this global shape at a range of row-major offsets, converted to f32.
    pub(crate) fn read_range(
        &self,
        name: &str,
        shape: &[usize],
        range: Range<usize>,
    ) -> Result<Vec<f32>> {
        let dtype = self.dtype_of(name, shape)?;
        let size = dtype.size_in_bytes();
        let mut values = vec![0f32; range.len()];
        let bytes = &self.bytes(name)?[range.start * size..range.end * size];
        decode(dtype, bytes, &mut values);
        Ok(values)
    }
}

pub(crate) fn decode(dtype: DType, bytes: &[u8], values: &mut [f32]) {
    fn each<const N: usize>(bytes: &[u8], values: &mut [f32], value: impl Fn([u8; N]) -> f32) {
        let (bytes, _) = bytes.as_chunks();
        for (place, bytes) in values.iter_mut().zip(bytes) {
            *place = value(*bytes);
        }
    }
    match dtype {
        DType::F16 => each(bytes, values, |b| f16::from_le_bytes(b).to_f32()),
        DType::BF16 => each(bytes, values, |b| bf16::from_le_bytes(b).to_f32()),
        _ => each(bytes, values, f32::from_le_bytes),
    }
}
