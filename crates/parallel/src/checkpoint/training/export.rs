//! The model of a training checkpoint as a Hugging Face folder, without the ranks that trained it.

use std::ops::Range;

use candle_core::{DType, Error, Result, bail};

use super::checkpoint::TrainingCheckpoint;
use super::manifest::FileRecord;
use super::piece::Piece;
use crate::checkpoint::hf_save::HfSave;
use crate::checkpoint::plan::{Content, SavePlan, SavedModel, SavedParam};
use crate::checkpoint::save::Folder;
use crate::files::{Checkpoint, SpaceNeed, check_free_space, read_file};
use crate::params::SaveSource;

impl TrainingCheckpoint {
    /// Writes what [`DistributedOptimizer::save_hf`](crate::DistributedOptimizer::save_hf) would have written after the checkpoint's
    /// step, bit by bit, from the files and those of `source`, the checkpoint that the parameters came from. A few MiB of values are in memory at
    /// a time. Without `source` all values must be in the checkpoint.
    ///
    /// # Errors
    /// As for a save; a source without the frozen parameters, or with other shapes.
    pub fn export_hf(&self, save: &HfSave, source: Option<&Checkpoint>) -> Result<()> {
        let model = self.saved_model(source)?;
        let plan = SavePlan::new(&model, save.dtype, save.max_file_bytes)?;
        check_free_space(&[SpaceNeed {
            folder: save.output.path().to_path_buf(),
            num_bytes: save.num_bytes_of(&plan)?,
            what: "the model",
        }])?;
        let folder = Folder::create(save, source.into_iter().map(Checkpoint::dir).collect())?;
        for file in &plan.files {
            let mut writer = folder.file(file)?;
            for tensor in &file.tensors {
                match tensor.content {
                    Content::Stored(..) => writer.write(tensor, None, source)?,
                    Content::Gathered(index, dtype) => {
                        let param = &model.params[index];
                        let read = |range| self.read_param(&param.name, &tensor.shape, range);
                        writer.write_in_chunks(tensor, dtype, read)?;
                    }
                }
            }
            writer.finish()?;
        }
        folder.finish(&plan)?;
        Ok(())
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

    fn saved_model<'a>(&self, source: Option<&'a Checkpoint>) -> Result<SavedModel<'a>> {
        let params = self.manifest.params.iter().map(|param| {
            let dtype = |name: &str| name.parse::<DType>().map_err(Error::wrap);
            Ok(SavedParam {
                name: param.name.clone(),
                shape: param.shape.clone(),
                stored_dtype: dtype(&param.stored_dtype)?,
                save_source: param.save_source,
            })
        });
        let params: Vec<SavedParam> = params.collect::<Result<_>>()?;
        if let (Some(dir), None, true) = (&self.manifest.source, source, self.needs_source()) {
            bail!(
                "the checkpoint {} has no values of parameters that were not trained; expected those of {}",
                self.dir().display(),
                dir.display()
            );
        }
        let from_source = self.manifest.params.iter().zip(&params);
        for (param, SavedParam { stored_dtype, .. }) in from_source {
            if let (true, Some(source)) =
                (self.is_from_source(&param.name, param.trainable), source)
            {
                let found = source.dtype_of(&param.name, &param.shape)?;
                if found != *stored_dtype {
                    bail!(
                        "tensor {} in {} is stored as {found:?}; expected {stored_dtype:?}, as when the run began",
                        param.name,
                        source.dir().display()
                    );
                }
            }
        }
        Ok(SavedModel {
            params,
            extras: self.manifest.extras.clone(),
            source,
            lora: self.manifest.lora.clone(),
        })
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
        match (param, source) {
            (Some(param), Some(source))
                if param.save_source == SaveSource::Source
                    || self.is_from_source(name, param.trainable) =>
            {
                source.read_range(name, shape, range)
            }
            _ => self.read_param(name, shape, range),
        }
    }

    /// The values of a parameter at a range of row-major offsets.
    fn read_param(&self, name: &str, shape: &[usize], range: Range<usize>) -> Result<Vec<f32>> {
        let param = self.manifest.params.iter().find(|param| param.name == name);
        let kind = param.and_then(|param| self.kind(name, param.trainable));
        let Some(kind) = kind else {
            bail!(
                "the checkpoint {} has no values of {name}",
                self.dir().display()
            );
        };
        let piece = Piece {
            name: name.to_string(),
            shape: shape.to_vec(),
            dim: 0,
            held: (0..shape.first().copied().unwrap_or(1)).into(),
            range,
        };
        self.read(kind, &piece)
    }
}
