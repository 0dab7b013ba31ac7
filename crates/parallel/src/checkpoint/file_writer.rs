//! A safetensors file that is filled tensor by tensor.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use candle_core::{DType, Device, Error, Result, Tensor};
use candle_gguf::Weights;

use super::plan::{Content, PlannedFile, PlannedTensor};
use super::save_failure::{SaveFailure, SaveResult};
use super::tensor_file::TensorFile;
use crate::files::Checkpoint;

/// Values that are read, converted and written at a time where tensors need not be whole.
pub(super) const VALUES_AT_ONCE: usize = 1 << 20;

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
    ) -> SaveResult<Self> {
        let path = place.join(&file.name);
        let header = file.header().map_err(SaveFailure::Weights)?;
        match TensorFile::create(&staged.join(&file.name), &header, num_written_bytes) {
            Ok(out) => Ok(Self { path, out }),
            Err(err) => Err(SaveFailure::at(&path, err)),
        }
    }

    /// Adds the next tensor of the plan, which lies in `source`.
    pub fn copy(&mut self, tensor: &PlannedTensor, source: Option<&Checkpoint>) -> SaveResult {
        match (&tensor.content, source) {
            (Content::Stored(name, Some(dtype)), Some(source)) => {
                let read = |rows| source.rows(name, &tensor.shape, rows);
                self.write_rows(tensor, *dtype, VALUES_AT_ONCE, read)
            }
            (Content::Stored(name, None), Some(source)) => {
                let bytes = source.bytes(name).map_err(SaveFailure::Weights)?;
                let written = self.out.write_mapped(bytes);
                written.map_err(|err| SaveFailure::at(&self.path, err))
            }
            _ => Err(SaveFailure::Weights(Error::msg(format!(
                "there are no values of tensor {}",
                tensor.name
            )))),
        }
    }

    /// Adds the next tensor of the plan, whose values are here.
    pub fn write(&mut self, tensor: &PlannedTensor, values: &Tensor) -> SaveResult {
        if values.dims() != tensor.shape {
            return Err(SaveFailure::Weights(Error::msg(format!(
                "{:?} was gathered for tensor {}; expected shape {:?}",
                values.dims(),
                tensor.name,
                tensor.shape
            ))));
        }
        let values = values.to_device(&Device::Cpu);
        self.write_values(&tensor.name, &values.map_err(SaveFailure::Weights)?)
    }

    /// Adds the next tensor of the plan in the type `dtype`, whose rows `read` gives: about `at_once` values are in
    /// memory at a time.
    pub fn write_rows(
        &mut self,
        tensor: &PlannedTensor,
        dtype: DType,
        at_once: usize,
        read: impl Fn(Range<usize>) -> Result<Vec<f32>>,
    ) -> SaveResult {
        let width = tensor.shape.last().copied().unwrap_or(1);
        let num_rows = tensor.shape.iter().rev().skip(1).product();
        let rows_at_once = (at_once / width.max(1)).max(1);
        for start in (0..num_rows).step_by(rows_at_once) {
            let end = start.saturating_add(rows_at_once).min(num_rows);
            let values = read(start..end)
                .and_then(|values| Tensor::from_vec(values, (end - start) * width, &Device::Cpu))
                .and_then(|values| values.to_dtype(dtype));
            self.write_values(&tensor.name, &values.map_err(SaveFailure::Weights)?)?;
        }
        Ok(())
    }

    fn write_values(&mut self, name: &str, values: &Tensor) -> SaveResult {
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

    pub fn finish(self) -> SaveResult {
        let path = self.path;
        let finished = self.out.finish();
        (finished.map(drop)).map_err(|err| SaveFailure::at(&path, err))
    }
}
