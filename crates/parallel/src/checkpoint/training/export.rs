//! The model of a training checkpoint as a Hugging Face folder, without the ranks that trained it.

use std::ops::Range;

use candle_core::{Result, bail};

use super::checkpoint::TrainingCheckpoint;
use super::manifest::FileRecord;
use crate::checkpoint::file_writer::VALUES_AT_ONCE;
use crate::checkpoint::hf_save::HfSave;
use crate::checkpoint::plan::SavePlan;
use crate::checkpoint::save::save_rows;
use crate::checkpoint::saved_model::SavedModel;
use crate::checkpoint::weights::CheckpointWeights;
use crate::files::{Checkpoint, read_file};
use crate::params::SaveSource;
use crate::view::View;

impl TrainingCheckpoint {
    /// Writes what [`DistributedOptimizer::save_hf`](crate::DistributedOptimizer::save_hf) would have written after the checkpoint's
    /// step, bit by bit, from the files and those of `source`, the checkpoint that the parameters came from. A few MiB of values are in memory at
    /// a time. Without `source` all values must be in the checkpoint.
    ///
    /// # Errors
    /// As for a save; a source without the frozen parameters, or with other shapes.
    pub fn export_hf(&self, save: &HfSave, source: Option<&Checkpoint>) -> Result<()> {
        self.check_source(source)?;
        let model = SavedModel {
            params: self.manifest.params.clone(),
            extras: self.manifest.extras.clone(),
            source,
            lora: self.manifest.lora.clone(),
        };
        let plan = SavePlan::new(&model, save.dtype, save.max_file_bytes)?;
        let weights = CheckpointWeights {
            checkpoint: self,
            // The plan says what is there.
            source: None,
        };
        save_rows(&weights, VALUES_AT_ONCE, &plan, source, save, &[])
    }

    /// The files that belong beside the weights: names and contents.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn sidecars(&self) -> Result<Vec<(String, Vec<u8>)>> {
        let files = self.manifest.files.iter();
        let files = files.filter_map(|file| Some((file, file.sidecar()?)));
        let read = |(file, name): (&FileRecord, &str)| {
            let path = self.dir().join(&file.name);
            match read_file(&path) {
                Ok(content) => Ok((name.to_string(), content)),
                Err(err) => bail!("cannot read {}: {err}", path.display()),
            }
        };
        files.map(read).collect()
    }

    /// Whether a tensor that is saved is in the checkpoint that the parameters came from, and nowhere else.
    pub fn needs_source(&self) -> bool {
        let manifest = &self.manifest;
        let is_elsewhere = |(_, repeats): &(String, Option<String>)| repeats.is_none();
        let mut params = manifest.params.iter();
        manifest.source.is_some()
            && manifest.lora.is_none()
            && (manifest.extras.iter().any(is_elsewhere)
                || params.any(|param| self.is_from_source(&param.name, param.trainable)))
    }

    fn is_from_source(&self, name: &str, trainable: bool) -> bool {
        self.kind(name, trainable).is_none()
    }

    /// An error unless `source` has the values that the checkpoint leaves to it.
    fn check_source(&self, source: Option<&Checkpoint>) -> Result<()> {
        if let (Some(dir), None, true) = (&self.manifest.source, source, self.needs_source()) {
            bail!(
                "the checkpoint {} has no values of parameters that were not trained; expected those of {}",
                self.dir().display(),
                dir.display()
            );
        }
        let Some(source) = source else { return Ok(()) };
        let params = self.manifest.params.iter();
        for param in params.filter(|it| self.is_from_source(&it.name, it.trainable)) {
            let found = source.dtype_of(&param.name, &param.shape)?;
            let expected = param.stored_dtype()?;
            if found != expected {
                bail!(
                    "tensor {} in {} is stored as {found:?}; expected {expected:?}, as when the run began",
                    param.name,
                    source.dir().display()
                );
            }
        }
        Ok(())
    }

    /// The values of a parameter of this shape at a range of row-major offsets, as they would be exported. Those that were not trained are read from
    /// `source`, the checkpoint that the parameters came from.
    ///
    /// # Errors
    /// There is no such parameter; it is in neither; files that cannot be read.
    pub fn read_range(
        &self,
        name: &str,
        shape: &[usize],
        range: Range<usize>,
        source: Option<&Checkpoint>,
    ) -> Result<Vec<f32>> {
        let param = self.manifest.params.iter().find(|param| param.name == name);
        let kind = param.and_then(|param| self.kind(name, param.trainable));
        let is_unchanged = param.is_some_and(|param| param.save_source == SaveSource::Source);
        match (kind, source) {
            (_, Some(source)) if is_unchanged || param.is_some() && kind.is_none() => {
                source.read_range(name, shape, range)
            }
            (None, _) => bail!(
                "the checkpoint {} has no values of {name}",
                self.dir().display()
            ),
            (Some(kind), _) => self.read(kind, &View::of_whole(name, shape, range)),
        }
    }
}
