//! Writes a Hugging Face checkpoint folder: whole beside its place, or not at all.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Component, Path};
use std::sync::Arc;

use candle_comm::{Mesh, message_of};
use candle_core::{DType, Error, Result, Tensor, bail};
use candle_gguf::Weights;

use super::file_writer::FileWriter;
use super::gather::gather_full;
use super::hf_save::HfSave;
use super::output_folder::ClaimedFolder;
use super::plan::{Content, PlannedFile, SavePlan};
use super::run_file::{RUN_FILE, RunFile};
use super::save_failure::{SaveFailure, SaveResult};
use super::saved_model::{ParamRecord, SavedModel};
use super::staged_folder::StagedFolder;
use crate::files::{Checkpoint, INDEX_FILE, check_free_space};
use crate::optimizer::DistributedOptimizer;
use crate::params::{Parameters, SaveSource};

/// Saves the parameters as a Hugging Face checkpoint that `transformers` loads; of a model with low-rank adapters these
/// alone, as `peft` loads them. Every rank must call it.
///
/// A parameter whose values were never changed is written as the checkpoint that it came from has it. After training in
/// a type that is narrower than the file's, [`DistributedOptimizer::save_hf`](crate::DistributedOptimizer::save_hf) has
/// the exact values.
///
/// Tensors pass through rank 0 one at a time. The folder is written beside its place, flushed to disk, and renamed as a
/// whole: a full disk or a crash leaves what was there as it was. An error of rank 0 is returned on every rank.
///
/// # Errors
/// Weights that are NaN or infinite, ranks whose copies of a weight differ, weights that do not fit the type in which
/// they are to be saved, a folder that holds what must not be replaced, and files that cannot be written. In the last
/// three cases the model goes to [`HfSave::rescue_dir`], where weights did not fit in f32, and the error says so.
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
    params.check_replicas(mesh, "when it was to be saved")?;
    let save_sources = params.save_sources(mesh)?;
    let model = SavedModel::of(params, &save_sources);
    let write = |save: &HfSave| {
        let plan = SavePlan::new(&model, save.dtype, save.max_file_bytes)?;
        write(params, mesh, &plan, save, |name, dtype| {
            let of_name = |param: &ParamRecord| param.name == name;
            let Some(place) = model.params.iter().position(of_name) else {
                bail!("there is no parameter {name}");
            };
            let is_refilled = save_sources[place] == SaveSource::Refill;
            let local = |index: usize| match is_refilled || params.get(index).dtype() == dtype {
                true => params.values(index),
                false => master(index)?.map_or_else(|| params.values(index), Ok),
            };
            gather_full(params, mesh, &params.catalog()[place], dtype, local)
        })
    };
    let failure = match (write(save)?, save.rescue()) {
        (Ok(()), _) => return Ok(()),
        (Err(failure @ (SaveFailure::Folder(_) | SaveFailure::Range(_))), Some(mut rescue)) => {
            let mut how = "";
            if let SaveFailure::Range(_) = failure {
                rescue = rescue.in_f32()?;
                how = "in f32, which holds them, ";
            }
            let line = match write(&rescue)? {
                Ok(()) => format!(
                    "hint: the model was saved {how}to {} instead",
                    rescue.output.path().display()
                ),
                Err(second) => {
                    let second = message_of(&second.into());
                    let why = second.lines().next().unwrap_or_default();
                    format!("hint: nor could it be rescued: {why}")
                }
            };
            failure.with_line(&line)
        }
        (Err(failure), _) => failure.into(),
    };
    Err(failure)
}

/// Writes the whole folder; the inner result is rank 0's, on every rank. `gather` gives the values of a parameter.
fn write(
    params: &Parameters,
    mesh: &Mesh,
    plan: &SavePlan,
    save: &HfSave,
    gather: impl Fn(&str, DType) -> Result<Option<Tensor>>,
) -> Result<SaveResult> {
    // After an error rank 0 goes on receiving, so that the other ranks are not left waiting, and writes no more.
    let mut folder = (mesh.world.rank() == 0)
        .then(|| Folder::create(save, params.source_dirs()))
        .transpose();
    for file in &plan.files {
        let mut writer = Ok(None);
        if let Ok(Some(folder)) = &folder {
            writer = folder.file(file).map(Some);
        }
        for tensor in &file.tensors {
            let gathered = match &tensor.content {
                Content::Stored(..) => None,
                Content::Values(name, dtype) => gather(name, *dtype)?,
            };
            let written = match (&mut writer, gathered) {
                (Ok(Some(open)), Some(values)) => open.write(tensor, &values),
                (Ok(Some(open)), None) => open.copy(tensor, params.checkpoint()),
                _ => Ok(()),
            };
            if let Err(failure) = written {
                writer = Err(failure);
            }
            // Nobody sends the next tensor before this one is written, and no wait lasts longer than one tensor takes.
            mesh.world.barrier()?;
        }
        if let Err(failure) = writer.and_then(|writer| writer.map_or(Ok(()), FileWriter::finish)) {
            folder = Err(failure);
        }
    }
    let written = folder.and_then(|folder| folder.map_or(Ok(()), |folder| folder.finish(plan)));
    SaveFailure::agree(written, mesh)
}

/// Writes the folder of `plan` where there are no ranks: `weights` are read by rows, about `at_once` values at a time,
/// and the rest is copied from `source`. Nothing in it or in `inputs` is replaced.
pub(super) fn save_rows(
    weights: &dyn Weights,
    at_once: usize,
    plan: &SavePlan,
    source: Option<&Checkpoint>,
    save: &HfSave,
    inputs: &[&Path],
) -> Result<()> {
    check_free_space(&[save.space_of(plan)?])?;
    let sources = source.map(Checkpoint::dir).into_iter();
    let folder = Folder::create(save, sources.chain(inputs.iter().copied()).collect())?;
    for file in &plan.files {
        let mut writer = folder.file(file)?;
        for tensor in &file.tensors {
            match &tensor.content {
                Content::Stored(..) => writer.copy(tensor, source)?,
                Content::Values(name, dtype) => {
                    let read = |rows| weights.rows(name, &tensor.shape, rows);
                    writer.write_rows(tensor, *dtype, at_once, read)?;
                }
            }
        }
        writer.finish()?;
    }
    Ok(folder.finish(plan)?)
}

/// A model's folder that is being written.
pub(super) struct Folder<'a> {
    save: &'a HfSave,
    /// What the tensors are read from.
    sources: Vec<&'a Path>,
    // Before the claim, which removes the folders that were made for nothing, as fields are dropped in this order.
    staged: StagedFolder,
    claimed: Arc<ClaimedFolder>,
}

impl<'a> Folder<'a> {
    /// `sources` are where the parameters came from.
    pub fn create(save: &'a HfSave, sources: Vec<&'a Path>) -> SaveResult<Self> {
        let claimed = save.output.claim().map_err(SaveFailure::Folder)?;
        let checked = save.check_replaceable(claimed.place(), &sources);
        checked.map_err(SaveFailure::Folder)?;
        let staged = claimed.stage();
        let staged = staged.map_err(|err| SaveFailure::at(claimed.place(), err))?;
        Ok(Self {
            save,
            sources,
            claimed,
            staged,
        })
    }

    pub fn file(&self, file: &PlannedFile) -> SaveResult<FileWriter> {
        let (staged, place) = (self.staged.path(), self.claimed.place());
        FileWriter::create(staged, place, file, self.save.num_written_bytes.clone())
    }

    /// Writes the small files and gives the folder its name.
    pub fn finish(self, plan: &SavePlan) -> SaveResult {
        let place = self.claimed.place();
        let index = plan.index().map(|index| serde_json::to_vec_pretty(&index));
        let index = index
            .transpose()
            .map_err(|err| SaveFailure::Weights(Error::wrap(err)))?;
        let index = index.map(|text| (INDEX_FILE.to_string(), text));
        for (name, content) in self.save.sidecars.iter().chain(&index).chain(&plan.config) {
            let written = write_small(self.staged.path(), name, content);
            written.map_err(|err| SaveFailure::at(&place.join(name), err))?;
        }
        let noted = self
            .save
            .run
            .as_deref()
            .map(|run| RunFile::write(self.staged.path(), run, self.save.steps));
        noted
            .transpose()
            .map_err(|err| SaveFailure::at(&place.join(RUN_FILE), err))?;
        // What has been put there since the beginning must not be lost either.
        let checked = self.save.check_replaceable(place, &self.sources);
        checked.map_err(SaveFailure::Folder)?;
        self.staged
            .commit(true)
            .map_err(|err| SaveFailure::at(place, err))
    }
}

/// Writes a file of a folder, `name` with `/` where it is in one that is in it.
pub(super) fn write_small(dir: &Path, name: &str, content: &[u8]) -> std::io::Result<()> {
    let mut parts = Path::new(name).components();
    if !parts.all(|part| matches!(part, Component::Normal(_))) {
        let message = format!("{name:?} is not a name in the folder");
        return Err(std::io::Error::new(
            std::io::ErrorKind::InvalidInput,
            message,
        ));
    }
    let path = dir.join(name);
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    File::create_new(path)?.write_all(content)
}

impl DistributedOptimizer {
    /// As [`save_hf`](crate::checkpoint::save_hf), but for weights that are stored in another type than they have here,
    /// such as f32 after training in bf16: their f32 masters are written. Every rank must call it.
    ///
    /// # Errors
    /// As [`save_hf`](crate::checkpoint::save_hf).
    pub fn save_hf(&self, save: &HfSave) -> Result<()> {
        save_with_masters(&self.params, &self.mesh, save, |index| self.master(index))
    }
}
