//! A safetensors file that is filled tensor by tensor.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use candle_core::{DType, Device, Error, Result, Tensor};

use super::plan::{Content, PlannedFile, PlannedTensor};
use super::save_failure::SaveFailure;
use super::tensor_file::TensorFile;
use crate::files::Checkpoint;

/// Values that are converted and written at a time where they need not be whole tensors.
const CHUNK_VALUES: usize = 1 << 20;

/// The file, open.
pub(super) struct FileWriter {
    /// What it will be called.
    path: PathBuf,
    out: TensorFile,
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
        match TensorFile::create(&staged.join(&file.name), &header, num_written_bytes) {
            Ok(out) => Ok(Self { path, out }),
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
        let written = (self.out)
            .write_values(values)
            .map_err(SaveFailure::Weights)?;
        // The loss and the gradients of a run cannot show what its last update did to the weights, nor what does not fit a type with a
        // smaller range: such weights must not replace those of an earlier checkpoint.
        match written.map_err(|err| SaveFailure::at(&self.path, err))? {
            true => Ok(()),
            false => {
                let err = Error::msg(format!(
                    "parameter {name} has values that are NaN or infinite in {:?}: nothing was saved\nhint: if the training has \
                     diverged, lower the learning rate; if the values do not fit the type, save in f32 or bf16",
                    values.dtype()
                ));
                Err(match values.dtype() {
                    DType::F32 => SaveFailure::Weights(err),
                    _ => SaveFailure::Range(err),
                })
            }
        }
    }

    fn write_bytes(&mut self, bytes: &[u8]) -> std::result::Result<(), SaveFailure> {
        let written = self.out.write_mapped(bytes);
        written.map_err(|err| SaveFailure::at(&self.path, err))
    }

    pub fn finish(self) -> std::result::Result<(), SaveFailure> {
        let path = self.path;
        let finished = self.out.finish();
        (finished.map(drop)).map_err(|err| SaveFailure::at(&path, err))
    }
}
