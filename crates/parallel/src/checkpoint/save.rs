//! Writes a Hugging Face checkpoint folder. Nothing that existed is touched before everything new is safely on disk.

use std::borrow::Cow;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use candle_comm::{Mesh, message_of};
use candle_core::{CpuStorage, DType, Device, Result, Storage, Tensor, bail};
use tempfile::NamedTempFile;

use super::gather::gather_full;
use super::plan::{Content, PlannedFile, PlannedTensor, SavePlan};
use crate::checkpoint::{Checkpoint, INDEX_FILE, WEIGHTS_FILE};
use crate::params::{Parameters, ValuesFrom};

/// What to write beside the weights, and how.
#[derive(Clone, Debug)]
pub struct HfSave {
    /// The folder; made if it does not exist.
    pub output: PathBuf,
    /// Files that make the folder complete, such as config.json and the tokenizer's: (name, content).
    pub sidecars: Vec<(String, Vec<u8>)>,
    /// Storage type; `None`: each tensor's own in the checkpoint it came from.
    pub dtype: Option<DType>,
    /// Weights are cut into files of at most this size.
    pub max_file_bytes: usize,
}

impl HfSave {
    /// Files of at most 5 GB, each tensor in the type it came in.
    pub fn new(output: impl Into<PathBuf>, sidecars: Vec<(String, Vec<u8>)>) -> Self {
        Self {
            output: output.into(),
            sidecars,
            dtype: None,
            max_file_bytes: 5_000_000_000,
        }
    }

    /// Checks, before hours of training, that a checkpoint can be written, without changing anything that exists: the folder
    /// is made if it is not there, and no folder may have the name of a file.
    pub fn check_writable(&self) -> Result<()> {
        let output = &self.output;
        let fail = |err: &dyn std::fmt::Display| {
            let output = output.display();
            candle_core::Error::msg(format!("cannot write to the output folder {output}: {err}"))
        };
        std::fs::create_dir_all(output)
            .and_then(|()| NamedTempFile::new_in(output))
            .and_then(|mut file| file.write_all(b"test"))
            .map_err(|err| fail(&err))?;
        let names = self.sidecars.iter().map(|(name, _)| name.as_str());
        for name in names.chain([WEIGHTS_FILE, INDEX_FILE]) {
            if output.join(name).is_dir() {
                return Err(fail(&format!("a folder has the name of the file {name}")));
            }
        }
        Ok(())
    }
}

/// The files of a checkpoint folder that are not weights: configuration, tokenizer, licence and the like.
pub fn sidecar_files(dir: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let fail = |path: &Path, err: std::io::Error| {
        candle_core::Error::msg(format!("cannot read {}: {err}", path.display()))
    };
    let mut sidecars = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(|err| fail(dir, err))? {
        let path = entry.map_err(|err| fail(dir, err))?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            continue;
        };
        let extension = path.extension().and_then(|extension| extension.to_str());
        let is_sidecar = matches!(extension, Some("json" | "txt" | "model" | "jinja" | "md"))
            || name.starts_with("LICENSE");
        let is_index = name.ends_with(".index.json");
        if is_sidecar && !is_index && path.is_file() {
            let content = std::fs::read(&path).map_err(|err| fail(&path, err))?;
            sidecars.push((name.to_string(), content));
        }
    }
    sidecars.sort();
    Ok(sidecars)
}

/// Saves the parameters as a Hugging Face checkpoint that `transformers` loads. Every rank must call it.
///
/// A parameter whose values were never changed is written as the checkpoint that it came from has it. After training in a type
/// that is narrower than the file's, [`DistributedOptimizer::save_hf`](crate::DistributedOptimizer::save_hf) has the exact values.
///
/// Tensors pass through rank 0 one at a time. All files are written under temporary names and flushed to disk before the
/// first one gets its name, so that a full disk or a crash leaves the previous checkpoint as it was. An error of rank 0 is
/// returned on every rank.
///
/// # Errors
/// Weights that are NaN or infinite, ranks whose copies of a weight differ, and files that cannot be written.
pub fn save_hf(params: &Parameters, mesh: &Mesh, save: &HfSave) -> Result<()> {
    save_with_masters(params, mesh, save, |_| Ok(None))
}

/// [`save_hf`], where `master` gives the values of a parameter before they were rounded, if it can.
pub(crate) fn save_with_masters(
    params: &Parameters,
    mesh: &Mesh,
    save: &HfSave,
    master: impl Fn(usize) -> Result<Option<Tensor>>,
) -> Result<()> {
    params.check_copies(mesh, "when it was to be saved", |index| {
        params.values(index)
    })?;
    let values_from = params.values_from(mesh)?;
    let plan = SavePlan::new(params, &values_from, save.dtype, save.max_file_bytes)?;
    let is_writer = mesh.world.rank() == 0;
    let mut failure = None;
    let mut written = Vec::new();
    for file in &plan.files {
        // After an error rank 0 goes on receiving, so that the other ranks are not left waiting, and writes no more.
        let mut writer = None;
        if is_writer && failure.is_none() {
            match FileWriter::create(&save.output, file) {
                Ok(created) => writer = Some(created),
                Err(err) => failure = Some(err),
            }
        }
        for tensor in &file.tensors {
            let gathered = match tensor.content {
                Content::Stored(..) => None,
                Content::Gathered(index, dtype) => {
                    let entry = &params.catalog()[index];
                    let is_refilled = values_from[index] == ValuesFrom::Refill;
                    gather_full(params, mesh, entry, dtype, |index| {
                        match is_refilled || params.get(index).dtype() == dtype {
                            true => params.values(index),
                            false => master(index)?.map_or_else(|| params.values(index), Ok),
                        }
                    })?
                }
            };
            if let (Some(open), None) = (&mut writer, &failure) {
                failure = open.write(tensor, gathered, params.checkpoint()).err();
            }
            // Nobody sends the next tensor before this one is written, and no wait lasts longer than one tensor takes.
            mesh.world.barrier()?;
        }
        if let (Some(writer), None) = (writer, &failure) {
            match writer.finish() {
                Ok(temp) => written.push((file.name.clone(), temp)),
                Err(err) => failure = Some(err),
            }
        }
    }
    if is_writer && failure.is_none() {
        failure = finish(&plan, save, written).err();
    }
    agree(mesh, failure)
}

/// Returns rank 0's error on every rank.
fn agree(mesh: &Mesh, failure: Option<candle_core::Error>) -> Result<()> {
    let message = failure.as_ref().map(message_of).unwrap_or_default();
    let all = mesh.world.all_gather_bytes(message.as_bytes())?;
    match (failure, all.first()) {
        (Some(err), _) => Err(err),
        (None, Some(message)) if !message.is_empty() => {
            bail!(
                "rank 0 could not save: {}",
                String::from_utf8_lossy(message)
            )
        }
        _ => Ok(()),
    }
}

fn write_error(path: &Path, err: impl std::fmt::Display) -> candle_core::Error {
    candle_core::Error::msg(format!(
        "cannot save to {}: {err}\nhint: nothing that was there before has been changed",
        path.display()
    ))
}

/// An error after the first file got its name.
fn rename_error(path: &Path, err: impl std::fmt::Display) -> candle_core::Error {
    candle_core::Error::msg(format!(
        "cannot finish the checkpoint at {}: {err}\nhint: every new file is complete, but files of the checkpoint before \
         may lie beside them; save again",
        path.display()
    ))
}

/// Writes the small files, then gives every file its name: weights first, the index after them, stale weights removed last.
fn finish(plan: &SavePlan, save: &HfSave, mut written: Vec<(String, NamedTempFile)>) -> Result<()> {
    let output = &save.output;
    let mut small = save.sidecars.clone();
    if let Some(index) = plan.index() {
        let text = serde_json::to_vec_pretty(&index).map_err(candle_core::Error::msg)?;
        small.push((INDEX_FILE.to_string(), text));
    }
    for (name, content) in small {
        let write = || -> std::io::Result<NamedTempFile> {
            let mut temp = temp_file(output)?;
            temp.write_all(&content)?;
            temp.as_file().sync_all()?;
            Ok(temp)
        };
        written.push((
            name.clone(),
            write().map_err(|err| write_error(&output.join(&name), err))?,
        ));
    }
    let names: Vec<String> = written.iter().map(|(name, _)| name.clone()).collect();
    // Renaming over a folder fails: found now, it costs nothing; found half-way, it would leave two checkpoints mixed.
    if let Some(name) = names.iter().find(|name| output.join(name).is_dir()) {
        return Err(write_error(&output.join(name), "a folder has that name"));
    }
    for (name, temp) in written {
        let path = output.join(&name);
        temp.persist(&path)
            .map_err(|err| rename_error(&path, err.error))?;
    }
    for entry in std::fs::read_dir(output).map_err(|err| rename_error(output, err))? {
        let path = entry.map_err(|err| rename_error(output, err))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if is_weights_name(&name) && !names.iter().any(|new| *new == name) && !path.is_dir() {
            std::fs::remove_file(&path).map_err(|err| rename_error(&path, err))?;
        }
    }
    let sync = File::open(output).and_then(|dir| dir.sync_all());
    sync.map_err(|err| rename_error(output, err))
}

/// Whether a file of this name is part of a checkpoint's weights, whatever number of files it had.
fn is_weights_name(name: &str) -> bool {
    let is_number =
        |digits: &str| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let number = name
        .strip_prefix("model-")
        .and_then(|name| name.strip_suffix(".safetensors"));
    let is_numbered = number
        .and_then(|number| number.split_once("-of-"))
        .is_some_and(|(index, count)| is_number(index) && is_number(count));
    is_numbered || name == WEIGHTS_FILE || name == INDEX_FILE
}

fn temp_file(dir: &Path) -> std::io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".saving-");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(std::fs::Permissions::from_mode(0o644));
    }
    builder.tempfile_in(dir)
}

/// A safetensors file that is filled tensor by tensor.
struct FileWriter {
    path: PathBuf,
    out: BufWriter<NamedTempFile>,
}

impl FileWriter {
    fn create(output: &Path, file: &PlannedFile) -> Result<Self> {
        let path = output.join(&file.name);
        let metadata = [("format".to_string(), "pt".to_string())].into();
        let header = safetensors::tensor::Metadata::new(Some(metadata), file.header())?;
        let mut header = serde_json::to_vec(&header).map_err(candle_core::Error::msg)?;
        header.resize(header.len().next_multiple_of(8), b' ');
        let create = || -> std::io::Result<BufWriter<NamedTempFile>> {
            std::fs::create_dir_all(output)?;
            let mut out = BufWriter::new(temp_file(output)?);
            out.write_all(&(header.len() as u64).to_le_bytes())?;
            out.write_all(&header)?;
            Ok(out)
        };
        let out = create().map_err(|err| write_error(&path, err))?;
        Ok(Self { path, out })
    }

    fn write(
        &mut self,
        tensor: &PlannedTensor,
        gathered: Option<Tensor>,
        source: Option<&Checkpoint>,
    ) -> Result<()> {
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
        self.out
            .write_all(&bytes)
            .map_err(|err| write_error(&self.path, err))
    }

    fn finish(self) -> Result<NamedTempFile> {
        let path = self.path;
        let temp = self
            .out
            .into_inner()
            .map_err(|err| write_error(&path, err))?;
        temp.as_file()
            .sync_all()
            .map_err(|err| write_error(&path, err))?;
        Ok(temp)
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
