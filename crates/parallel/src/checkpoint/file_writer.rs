//! A safetensors file that is filled tensor by tensor.

use std::borrow::Cow;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use candle_core::{CpuStorage, Device, Result, Storage, Tensor, bail};

use super::plan::{Content, PlannedFile, PlannedTensor};
use super::reader::Checkpoint;
use super::save_failure::SaveFailure;

/// The file, open.
pub(super) struct FileWriter {
    /// What it will be called.
    path: PathBuf,
    out: BufWriter<File>,
}

impl FileWriter {
    /// Begins `file` with its header in the folder `staged`, which will be `place`.
    pub fn create(
        (staged, place): (&Path, &Path),
        file: &PlannedFile,
    ) -> std::result::Result<Self, SaveFailure> {
        let path = place.join(&file.name);
        let header = file.header().map_err(SaveFailure::Weights)?;
        let create = || -> std::io::Result<BufWriter<File>> {
            let mut out = BufWriter::new(File::create_new(staged.join(&file.name))?);
            out.write_all(&header)?;
            Ok(out)
        };
        match create() {
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
        let bytes = bytes(tensor, gathered, source).map_err(SaveFailure::Weights)?;
        let written = self.out.write_all(&bytes);
        written.map_err(|err| SaveFailure::at(&self.path, err))
    }

    pub fn finish(mut self) -> std::result::Result<(), SaveFailure> {
        let flushed = self.out.flush();
        flushed.map_err(|err| SaveFailure::at(&self.path, err))
    }
}

fn bytes<'a>(
    tensor: &PlannedTensor,
    gathered: Option<Tensor>,
    source: Option<&'a Checkpoint>,
) -> Result<Cow<'a, [u8]>> {
    let to_bytes = |values: &Tensor| {
        check_finite(&tensor.name, values)?;
        to_le_bytes(values).map(Cow::Owned)
    };
    let bytes = match (&tensor.content, gathered, source) {
        (Content::Stored(name, None), _, Some(source)) => Cow::Borrowed(source.bytes(name)?),
        (Content::Stored(name, Some(dtype)), _, Some(source)) => {
            let values = source.read(name, &tensor.shape, None)?;
            let values = Tensor::from_vec(values, tensor.shape.as_slice(), &Device::Cpu)?;
            to_bytes(&values.to_dtype(*dtype)?)?
        }
        (_, Some(values), _) => to_bytes(&values.to_device(&Device::Cpu)?)?,
        _ => bail!("there is nothing to write for tensor {}", tensor.name),
    };
    if bytes.len() != tensor.num_bytes() {
        bail!(
            "tensor {} has {} bytes; expected {} from its shape {:?}",
            tensor.name,
            bytes.len(),
            tensor.num_bytes(),
            tensor.shape
        );
    }
    Ok(bytes)
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
