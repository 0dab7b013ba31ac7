//! A safetensors file that is filled tensor by tensor.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{CpuStorage, DType, Device, Error, Result, Storage, Tensor, bail};

use super::plan::{Content, PlannedFile, PlannedTensor};
use super::save_failure::SaveFailure;
use crate::files::Checkpoint;

/// Values that are converted and written at a time where they need not be whole tensors.
const CHUNK_VALUES: usize = 1 << 20;

/// The file, open.
pub(super) struct FileWriter {
    /// What it will be called.
    path: PathBuf,
    out: BufWriter<File>,
    num_written_bytes: Arc<AtomicU64>,
}

impl FileWriter {
    /// Begins `file` with its header in the folder `staged`, which will be `place`.
    pub fn create(
        staged: &Path,
        place: &Path,
        file: &PlannedFile,
        num_written_bytes: Arc<AtomicU64>,
    ) -> std::result::Result<Self, SaveFailure> {
        let path = place.join(&file.name);
        let header = file.header().map_err(SaveFailure::Weights)?;
        let create = || -> std::io::Result<BufWriter<File>> {
            let mut out = BufWriter::new(File::create_new(staged.join(&file.name))?);
            out.write_all(&header)?;
            Ok(out)
        };
        match create() {
            Ok(out) => Ok(Self {
                path,
                out,
                num_written_bytes,
            }),
            Err(err) => Err(SaveFailure::at(&path, err)),
        }
    }

    /// Adds the next tensor of the plan, which was gathered or lies in `source`.
    pub fn write(
        &mut self,
        tensor: &PlannedTensor,
        gathered: Option<Tensor>,
        source: Option<&Checkpoint>,
    ) -> std::result::Result<(), SaveFailure> {
        match (&tensor.content, gathered, source) {
            (Content::Stored(name, None), _, Some(source)) => {
                let bytes = source.bytes(name).map_err(SaveFailure::Weights)?;
                self.write_bytes(bytes)
            }
            (Content::Stored(name, Some(dtype)), _, Some(source)) => {
                let read = |range| source.read_range(name, &tensor.shape, range);
                self.write_in_chunks(tensor, *dtype, read)
            }
            (_, Some(values), _) if values.dims() == tensor.shape => {
                let values = values.to_device(&Device::Cpu);
                self.write_values(&tensor.name, &values.map_err(SaveFailure::Weights)?)
            }
            (_, gathered, _) => Err(SaveFailure::Weights(Error::msg(format!(
                "{:?} was gathered for tensor {}; expected shape {:?}",
                gathered.map(|values| values.dims().to_vec()),
                tensor.name,
                tensor.shape
            )))),
        }
    }

    /// Adds the next tensor of the plan in the type `dtype`, of which `read` gives the values at a range of row-major offsets: a few of
    /// them are in memory at a time.
    pub fn write_in_chunks(
        &mut self,
        tensor: &PlannedTensor,
        dtype: DType,
        read: impl Fn(Range<usize>) -> Result<Vec<f32>>,
    ) -> std::result::Result<(), SaveFailure> {
        let num_values: usize = tensor.shape.iter().product();
        for start in (0..num_values).step_by(CHUNK_VALUES) {
            let end = num_values.min(start + CHUNK_VALUES);
            let values = read(start..end)
                .and_then(|values| Tensor::from_vec(values, end - start, &Device::Cpu))
                .and_then(|values| values.to_dtype(dtype));
            self.write_values(&tensor.name, &values.map_err(SaveFailure::Weights)?)?;
        }
        Ok(())
    }

    fn write_values(
        &mut self,
        name: &str,
        values: &Tensor,
    ) -> std::result::Result<(), SaveFailure> {
        check_finite(name, values).map_err(match values.dtype() {
            DType::F32 => SaveFailure::Weights,
            _ => SaveFailure::Range,
        })?;
        self.write_bytes(&to_le_bytes(values).map_err(SaveFailure::Weights)?)
    }

    fn write_bytes(&mut self, bytes: &[u8]) -> std::result::Result<(), SaveFailure> {
        for chunk in bytes.chunks(CHUNK_VALUES) {
            let written = self.out.write_all(chunk);
            written.map_err(|err| SaveFailure::at(&self.path, err))?;
            let num_bytes = chunk.len() as u64;
            self.num_written_bytes
                .fetch_add(num_bytes, Ordering::Relaxed);
        }
        Ok(())
    }

    pub fn finish(mut self) -> std::result::Result<(), SaveFailure> {
        let flushed = self.out.flush();
        flushed.map_err(|err| SaveFailure::at(&self.path, err))
    }
}

/// The loss and the gradients of a run cannot show what its last update did to the weights, nor what does not fit a type
/// with a smaller range: such weights must not replace those of an earlier checkpoint.
fn check_finite(name: &str, values: &Tensor) -> Result<()> {
    let (storage, _) = values.storage_and_layout();
    let is_finite = match &*storage {
        Storage::Cpu(CpuStorage::F32(v)) => v.iter().all(|x| x.is_finite()),
        Storage::Cpu(CpuStorage::F16(v)) => v.iter().all(|x| x.is_finite()),
        Storage::Cpu(CpuStorage::BF16(v)) => v.iter().all(|x| x.is_finite()),
        _ => true,
    };
    if !is_finite {
        bail!(
            "parameter {name} has values that are NaN or infinite in {:?}: nothing was saved\nhint: if the training has \
             diverged, lower the learning rate; if the values do not fit the type, save in f32 or bf16",
            values.dtype()
        );
    }
    Ok(())
}

fn to_le_bytes(values: &Tensor) -> Result<Vec<u8>> {
    let values = values.contiguous()?;
    let (storage, layout) = values.storage_and_layout();
    let range = match layout.contiguous_offsets() {
        Some((start, end)) => start..end,
        None => bail!("cannot save a tensor that is not contiguous"),
    };
    match &*storage {
        Storage::Cpu(CpuStorage::F32(v)) => {
            Ok(v[range].iter().flat_map(|x| x.to_le_bytes()).collect())
        }
        Storage::Cpu(CpuStorage::F16(v)) => {
            Ok(v[range].iter().flat_map(|x| x.to_le_bytes()).collect())
        }
        Storage::Cpu(CpuStorage::BF16(v)) => {
            Ok(v[range].iter().flat_map(|x| x.to_le_bytes()).collect())
        }
        _ => bail!(
            "cannot save a tensor of type {:?}; expected f32, f16 or bf16",
            values.dtype()
        ),
    }
}
