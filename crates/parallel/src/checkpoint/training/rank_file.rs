//! The safetensors file of one rank: written tensor by tensor with its checksum, read piece by piece from a map.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{DType, Error, Result, Tensor, bail};
use safetensors::{Dtype, SafeTensors};

use super::folder::cannot;
use super::manifest::{CheckpointManifest, FileRecord};
use super::rank_tensors::RankTensors;
use crate::checkpoint::tensor_file::{TensorFile, header};
use crate::files::{MappedFile, decode};
use crate::view::View;

/// What readers of safetensors accept before the tensors.
const MAX_HEADER_BYTES: usize = 100_000_000;

/// A file of a checkpoint, opened.
pub(super) struct RankFile {
    path: PathBuf,
    map: MappedFile,
    tensors: HashMap<String, (Dtype, Range<usize>)>,
    pub pieces: Vec<View>,
}

pub(super) fn file_name(rank: usize) -> String {
    format!("rank-{rank:05}.safetensors")
}

/// A rank's file that is being written, tensor after tensor, with its checksum.
pub(super) struct RankFileWriter {
    out: TensorFile,
    path: PathBuf,
    rank: usize,
    num_bytes: Arc<AtomicU64>,
}

impl RankFileWriter {
    /// Begins the file in `dir`, which is to have `all` and to be of the save of `manifest`.
    ///
    /// # Errors
    /// What the file system returns.
    pub fn create(
        dir: &Path,
        rank: usize,
        manifest: &CheckpointManifest,
        all: &RankTensors,
    ) -> Result<Self> {
        let pieces = serde_json::to_string(&all.pieces).map_err(Error::wrap)?;
        let metadata = [
            ("run".to_string(), manifest.run.clone()),
            ("step".to_string(), manifest.step.to_string()),
            ("pieces".to_string(), pieces),
        ];
        let tensors = all.tensors.iter().map(|tensor| {
            let shape = vec![tensor.len];
            (tensor.name.clone(), tensor.dtype.into(), shape)
        });
        let header = header(tensors, metadata.into())?;
        if header.len() > MAX_HEADER_BYTES {
            bail!(
                "the list of what this rank saves has {} bytes, and a safetensors file at most {MAX_HEADER_BYTES}\nhint: a larger \
                 Offload::update_values, which divides the optimizer's state into fewer parts",
                header.len()
            );
        }
        let (path, num_bytes) = (dir.join(file_name(rank)), Arc::default());
        let out = TensorFile::create(&path, &header, Arc::clone(&num_bytes));
        Ok(Self {
            out: out.map_err(|err| cannot_write(&path, &err))?,
            path,
            rank,
            num_bytes,
        })
    }

    /// Adds the values of the next tensor, called `name`.
    ///
    /// # Errors
    /// Values that are NaN or infinite, and what the file system returns.
    pub fn push(&mut self, name: &str, values: &Tensor) -> Result<()> {
        let written = self.out.write_values(values);
        let written = written.map_err(|err| err.context(name.to_string()))?;
        if !written.map_err(|err| cannot_write(&self.path, &err))? {
            bail!("{name} has values that are NaN or infinite: nothing is saved");
        }
        Ok(())
    }

    /// Syncs the file, which has all its tensors.
    ///
    /// # Errors
    /// What the file system returns.
    pub fn finish(self) -> Result<FileRecord> {
        let synced = self.out.finish();
        let synced = synced.and_then(|(file, hash)| file.sync_all().map(|()| hash));
        let hash = synced.map_err(|err| cannot_write(&self.path, &err))?;
        let num_bytes = self.num_bytes.load(Ordering::Relaxed);
        Ok(FileRecord::new(file_name(self.rank), num_bytes, hash))
    }
}

fn cannot_write(path: &Path, err: &std::io::Error) -> Error {
    cannot("write the checkpoint's file", path, err)
}

/// An error that names the first tensor of a rank's file with values that are NaN or infinite.
pub(super) fn check_finite(path: &Path) -> Result<()> {
    let map = MappedFile::open(path)?;
    let file = SafeTensors::deserialize(&map)
        .map_err(|err| Error::msg(format!("cannot read {}: {err}", path.display())))?;
    for (name, tensor) in file.iter() {
        let dtype = match tensor.dtype() {
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::BF16,
            _ => continue,
        };
        let num_wrong = |bytes: &[u8]| {
            let mut values = vec![0f32; bytes.len() / dtype.size_in_bytes()];
            decode(dtype, bytes, &mut values);
            values.iter().filter(|value| !value.is_finite()).count()
        };
        let num_wrong: usize = tensor.data().chunks(1 << 20).map(num_wrong).sum();
        if num_wrong > 0 {
            bail!(
                "{name} in {} has {num_wrong} values that are NaN or infinite: the training had diverged when it was saved",
                path.display()
            );
        }
    }
    Ok(())
}

impl RankFile {
    /// Opens a file whose size and checksum were compared, and that belongs to the save of `manifest`.
    pub fn open(path: &Path, manifest: &CheckpointManifest) -> Result<Self> {
        let map = MappedFile::open(path)?;
        let fail = |what: &dyn std::fmt::Display| {
            Error::msg(format!(
                "{} is not a file of a training checkpoint: {what}",
                path.display()
            ))
        };
        let (header_len, metadata) = SafeTensors::read_metadata(&map).map_err(|err| fail(&err))?;
        let first = header_len + size_of::<u64>();
        let texts = metadata.metadata().clone().unwrap_or_default();
        let text = |name: &str| texts.get(name).map_or("", String::as_str);
        let CheckpointManifest { run, step, .. } = manifest;
        if text("run") != run || text("step") != step.to_string() {
            bail!(
                "{} belongs to step {} of run {}; expected step {step} of run {run}, whose manifest is beside it",
                path.display(),
                text("step"),
                text("run")
            );
        }
        let pieces: Vec<View> = serde_json::from_str(text("pieces")).map_err(|err| fail(&err))?;
        if let Some(piece) = pieces.iter().find(|piece| !piece.is_valid()) {
            return Err(fail(&format!("{piece:?} does not fit its shape")));
        }
        let tensors = metadata.tensors().into_iter().map(|(name, info)| {
            let (start, end) = info.data_offsets;
            (name, (info.dtype, first + start..first + end))
        });
        Ok(Self {
            path: path.to_path_buf(),
            tensors: tensors.collect(),
            pieces,
            map,
        })
    }

    /// Type and bytes of a tensor of so many values; `None` if it is not here.
    pub fn tensor(&self, name: &str, len: usize) -> Result<Option<(Dtype, &[u8])>> {
        let Some((dtype, range)) = self.tensors.get(name) else {
            return Ok(None);
        };
        let bytes = &self.map[range.clone()];
        let is_float = matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16);
        let size = dtype.bitsize() / 8;
        if !is_float || len.checked_mul(size) != Some(bytes.len()) {
            bail!(
                "tensor {name} in {} has {} bytes of {dtype:?}; expected {len} floats",
                self.path.display(),
                bytes.len()
            );
        }
        Ok(Some((*dtype, bytes)))
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use safetensors::tensor::TensorView;

    use super::*;

    #[test]
    fn values_that_are_not_finite_are_found_in_every_type() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rank-00000.safetensors");
        let write = |dtype: Dtype, bytes: Vec<u8>| {
            let shape = vec![bytes.len() * 8 / dtype.bitsize()];
            let tensor = TensorView::new(dtype, shape, &bytes).unwrap();
            let file = safetensors::serialize([("a.weight", tensor)], None).unwrap();
            std::fs::write(&path, file).unwrap();
            check_finite(&path)
        };
        write(
            Dtype::F32,
            [1.0f32, f32::MAX].map(f32::to_le_bytes).concat(),
        )
        .unwrap();
        // Their bits are those of a NaN in halves.
        write(Dtype::I32, [u32::MAX].map(u32::to_le_bytes).concat()).unwrap();
        for (dtype, bytes) in [
            (
                Dtype::F32,
                [1.0, f32::NAN, f32::NEG_INFINITY]
                    .map(f32::to_le_bytes)
                    .concat(),
            ),
            (
                Dtype::F16,
                [f16::NAN, f16::MAX, f16::INFINITY]
                    .map(f16::to_le_bytes)
                    .concat(),
            ),
            (
                Dtype::BF16,
                [bf16::NAN, bf16::INFINITY, bf16::MAX]
                    .map(bf16::to_le_bytes)
                    .concat(),
            ),
        ] {
            let message = write(dtype, bytes).unwrap_err().to_string();
            assert!(message.contains("a.weight in "), "{message}");
            assert!(
                message.contains("has 2 values that are NaN or infinite"),
                "{message}"
            );
        }
    }
}
