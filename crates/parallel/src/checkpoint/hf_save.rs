//! What to write beside the weights, how, and where.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use candle_core::{DType, Result};

use super::config_dtype::with_config_dtype;
use super::model_folder::ModelFolder;
use super::output_folder::{ClaimedFolder, OutputFolder};
use super::plan::SavePlan;
use super::run_file::RunFile;
use super::saved_model::SavedModel;
use crate::files::SpaceNeed;
use crate::params::{Parameters, SaveSource};

/// What to write beside the weights, how, and where.
#[derive(Clone, Debug)]
pub struct HfSave {
    /// The folder, which is replaced as a whole.
    pub output: OutputFolder,
    /// Files that make the folder complete, such as config.json and the tokenizer's: (name, content). The configuration of low-rank
    /// adapters is none of them: it is written with these.
    pub sidecars: Vec<(String, Vec<u8>)>,
    /// Storage type; `None`: each tensor's own in the checkpoint it came from.
    pub dtype: Option<DType>,
    /// Weights are cut into files of at most this size.
    pub max_file_bytes: usize,
    /// Whether a model that is there is replaced.
    pub overwrite: bool,
    /// What decides the values of the weights, in any form. It is noted in a small file in the folder. One that has the same is replaced
    /// without [`Self::overwrite`] while no file in it has been changed.
    pub run: Option<String>,
    /// Steps that were done, of a run that is stopped before its end. Its model never replaces one of more steps of the same run without
    /// [`Self::overwrite`].
    pub steps: Option<usize>,
    /// Files and folders that the run reads, which are never replaced. The checkpoint that the parameters came from is always one.
    pub inputs: Vec<PathBuf>,
    /// Counts the bytes of weights that are written: to show how far a save is.
    pub num_written_bytes: Arc<AtomicU64>,
    /// If the model cannot be saved to its folder, or not in its type, it goes to a new one in this; `None`: nowhere.
    pub rescue_dir: Option<PathBuf>,
}

impl HfSave {
    /// Files of at most 5 GB, each tensor in the type it came in; only an empty folder is replaced.
    pub fn new(output: impl Into<PathBuf>, sidecars: Vec<(String, Vec<u8>)>) -> Self {
        Self {
            output: OutputFolder::new(output),
            sidecars,
            dtype: None,
            max_file_bytes: 5_000_000_000,
            overwrite: false,
            run: None,
            steps: None,
            inputs: Vec::new(),
            num_written_bytes: Arc::default(),
            rescue_dir: None,
        }
    }

    /// Checks, before hours of training, that the model can be saved to its folder, and changes nothing that exists. For as long as
    /// the result lives no other run can write there.
    ///
    /// # Errors
    /// As [`OutputFolder::claim`], and a folder that holds what must not be replaced.
    pub fn check_output(&self) -> Result<Arc<ClaimedFolder>> {
        let claimed = self.output.claim()?;
        self.check_replaceable(claimed.place(), &[])?;
        Ok(claimed)
    }

    /// Where the model will be, if [`Self::check_output`] would allow it now; nothing is made or changed.
    ///
    /// # Errors
    /// As [`Self::check_output`].
    pub fn look(&self) -> Result<PathBuf> {
        let place = self.output.look()?;
        self.check_replaceable(&place, &[])?;
        Ok(place)
    }

    /// What [`Self::check_output`] says of the folder for any value of [`Self::run`], before that is known and without claiming the folder: it
    /// holds an input, other files than a model's, or a model that no run has made.
    ///
    /// # Errors
    /// That one.
    pub fn check_place(&self) -> Result<()> {
        let place = self.output.path();
        self.of_any_run().check_replaceable(place, &[])
    }

    /// The same save, to which the model of any run gives way.
    pub fn of_any_run(&self) -> Self {
        Self {
            overwrite: self.overwrite || RunFile::read(self.output.path()).is_some(),
            ..self.clone()
        }
    }

    /// What the model takes, beside the one that it replaces: for [`check_free_space`](super::check_free_space).
    ///
    /// # Errors
    /// As [`Self::num_bytes`].
    pub fn space_need(&self, params: &Parameters) -> Result<SpaceNeed> {
        let anywhere = vec![SaveSource::default(); params.catalog().len()];
        let model = SavedModel::of(params, &anywhere);
        self.space_of(&SavePlan::new(&model, self.dtype, self.max_file_bytes)?)
    }

    pub(super) fn space_of(&self, plan: &SavePlan) -> Result<SpaceNeed> {
        let sidecars = self.sidecars.iter();
        let sidecars = sidecars.map(|(_, content)| content.len() as u64);
        Ok(SpaceNeed {
            folder: self.output.path().to_path_buf(),
            num_bytes: plan.num_bytes()? + sidecars.sum::<u64>(),
            what: "the model",
        })
    }

    /// The size of all files to be written, but for the note of [`Self::run`].
    ///
    /// # Errors
    /// Tensors that cannot be saved.
    pub fn num_bytes(&self, params: &Parameters) -> Result<u64> {
        Ok(self.space_need(params)?.num_bytes)
    }

    /// An error if `place` holds anything that must not be replaced; `sources` are where the parameters came from.
    pub(super) fn check_replaceable(&self, place: &Path, sources: &[&Path]) -> Result<()> {
        let Ok(metadata) = place.metadata() else {
            return Ok(());
        };
        let refuse = |why: String| Err(self.output.error(&why));
        let inputs = self.inputs.iter().map(PathBuf::as_path);
        for input in inputs.chain(sources.iter().copied()) {
            let is_same = input
                .metadata()
                .is_ok_and(|input| (input.dev(), input.ino()) == (metadata.dev(), metadata.ino()));
            if is_same || is_in(input, place) {
                let input = input.display();
                return refuse(format!(
                    "it is or holds {input}, which this run reads\nhint: choose another folder"
                ));
            }
        }
        let folder = ModelFolder::read(place).map_err(|err| self.output.error(&err.to_string()))?;
        let has_more = folder.foreign.len() > 3;
        let foreign = folder.foreign.iter().take(3);
        let foreign = foreign.map(String::as_str).collect::<Vec<_>>().join(", ");
        match (foreign.is_empty(), folder.is_model()) {
            (false, _) => refuse(format!(
                "it holds what is no part of a model ({foreign}{}), and would be replaced as a whole\nhint: choose another folder",
                if has_more { ", .." } else { "" }
            )),
            (true, false) if !folder.sidecars.is_empty() => refuse(format!(
                "it holds {}, but no model, and would be replaced as a whole\nhint: choose another folder",
                folder.sidecars.join(", ")
            )),
            (true, false) => Ok(()),
            (true, true) if self.overwrite || self.is_of_this_run(place) => Ok(()),
            (true, true) => refuse(format!(
                "it holds a model already{}\nhint: HfSave::overwrite (--overwrite) replaces it, another folder (--output) leaves it",
                self.difference_to(place)
            )),
        }
    }

    /// Why the model in `place` is not replaced by itself, as a part of a sentence.
    fn difference_to(&self, place: &Path) -> String {
        let Some(run) = &self.run else {
            return String::new();
        };
        let note = RunFile::read(place);
        let is_of_run =
            |note: &RunFile| RunFile::of(place, run, note.steps).is_ok_and(|now| now == *note);
        match note.filter(is_of_run) {
            Some(RunFile {
                steps: Some(steps), ..
            }) => format!(", that of this command after step {steps}, and this run has done less"),
            Some(_) => ", that of this command at its end, and this run has done less".to_string(),
            None => ", which is not that of an earlier run of this command".to_string(),
        }
    }

    /// Whether everything in `place` is what an earlier save of the same run has written.
    fn is_of_this_run(&self, place: &Path) -> bool {
        let Some(run) = &self.run else { return false };
        let Some(note) = RunFile::read(place) else {
            return false;
        };
        let is_further = match (self.steps, note.steps) {
            (None, _) => true,
            (Some(own), Some(noted)) => own >= noted,
            (Some(_), None) => false,
        };
        is_further && RunFile::of(place, run, note.steps).is_ok_and(|now| now == note)
    }

    /// This save with all weights in f32.
    pub(super) fn in_f32(self) -> Result<Self> {
        let dtype = Some(DType::F32);
        Ok(Self {
            dtype,
            sidecars: with_config_dtype(self.sidecars, dtype)?,
            ..self
        })
    }

    /// This save to a new folder in [`Self::rescue_dir`], if there is one.
    pub(super) fn rescue(&self) -> Option<Self> {
        let name = self.output.path().file_name();
        let name = name.map_or("model".into(), |name| name.to_string_lossy());
        let dir = self.rescue_dir.as_ref()?;
        let numbers =
            std::iter::once(String::new()).chain((2..).map(|number| format!("-{number}")));
        let mut places = numbers.map(|number| dir.join(format!("{name}-rescued{number}")));
        let place = places.find(|place| place.symlink_metadata().is_err())?;
        Some(Self {
            output: OutputFolder::new(place),
            rescue_dir: None,
            ..self.clone()
        })
    }
}

/// Whether `input` or a file of it, wherever links lead, is in `place`.
fn is_in(input: &Path, place: &Path) -> bool {
    let is_in = |path: &Path| fs::canonicalize(path).is_ok_and(|path| path.starts_with(place));
    let files = fs::read_dir(input).into_iter().flatten().flatten();
    is_in(input) || files.into_iter().any(|entry| is_in(&entry.path()))
}
