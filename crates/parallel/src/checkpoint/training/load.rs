//! Puts a checkpoint's values where this rank keeps them, whatever the layout.

use std::collections::BTreeMap;
use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, bail};

use super::checkpoint::TrainingCheckpoint;
use super::own_values::{OwnValues, own_values};
use super::rank_tensors::{WEIGHT, tensor_name};
use crate::agreement::agree;
use crate::checkpoint::ParamRecord;
use crate::files::decode;
use crate::optimizer::{DistributedOptimizer, MASTER};
use crate::params::{ParamSpec, Parameters, SaveSource};
use crate::view::View;

impl TrainingCheckpoint {
    /// An error that names the first parameter which the model has in another way: the checkpoint is of another model.
    ///
    /// # Errors
    /// That one.
    pub fn check_model(&self, params: &Parameters) -> Result<()> {
        let records = self.manifest.params.iter();
        let records: BTreeMap<&str, &ParamRecord> = records
            .map(|record| (record.name.as_str(), record))
            .collect();
        let dir = self.dir().display();
        let hint = "hint: resume with the model, and the frozen parameters (--freeze), that the checkpoint was made with";
        for ParamSpec {
            name,
            shape,
            trainable,
            ..
        } in params.catalog()
        {
            let Some(record) = records.get(name.as_str()) else {
                bail!("the checkpoint {dir} does not have the model's parameter {name}\n{hint}");
            };
            if record.shape != *shape {
                bail!(
                    "parameter {name} has shape {:?} in the checkpoint {dir}; expected the model's {shape:?}\n{hint}",
                    record.shape
                );
            }
            if record.trainable != *trainable {
                let word = |trainable| if trainable { "trained" } else { "frozen" };
                bail!(
                    "parameter {name} is {} in the checkpoint {dir}; expected it {}\n{hint}",
                    word(record.trainable),
                    word(*trainable)
                );
            }
        }
        if let Some(record) = self.manifest.params.iter().find(|record| {
            let entry = |entry: &ParamSpec| entry.name == record.name;
            !params.catalog().iter().any(entry)
        }) {
            bail!(
                "the checkpoint {dir} has the parameter {}, which the model does not have\n{hint}",
                record.name
            );
        }
        Ok(())
    }

    /// Gives the parameters of `optimizer` and its state the values that they have in the checkpoint, of which this rank reads what it
    /// needs. Every rank must call it.
    ///
    /// # Errors
    /// The same on every rank: another model, another optimizer, values that are nowhere. Some values may have been replaced then.
    pub fn load(&self, optimizer: &mut DistributedOptimizer) -> Result<()> {
        let world = optimizer.mesh.world.clone();
        let loaded = self.load_own(optimizer);
        agree(&world, loaded)
    }

    fn load_own(&self, optimizer: &mut DistributedOptimizer) -> Result<()> {
        self.check_model(&optimizer.params)?;
        optimizer.check_rule(&self.manifest.optimizer)?;
        let params = optimizer.params.clone();
        params.wait_for_updates()?;
        if let Some(sharded) = params.sharded() {
            sharded.free_all()?;
        }
        params.packed().forget();
        let own = own_values(optimizer);
        for of_bucket in own.chunk_by(|a, b| a.bucket == b.bucket) {
            self.load_bucket(optimizer, of_bucket)?;
        }
        for index in 0..params.len() {
            let from = self.save_source(&params.get(index).name);
            if params.sharded().is_none() {
                let param = params.get(index);
                let piece = param.view(0..param.num_values());
                if let Some(values) = self.weights(&params, index, &piece)? {
                    params.put(index, &values.reshape(param.local_shape())?)?;
                }
            }
            let is_trained = params.layout().place(index).is_some();
            if is_trained || from != SaveSource::Source {
                params.set_save_source(index, from);
            }
        }
        optimizer.set_counters(&self.manifest.optimizer);
        Ok(())
    }

    /// Loads what lies in this rank's slice of one bucket.
    fn load_bucket(&self, optimizer: &DistributedOptimizer, of_bucket: &[OwnValues]) -> Result<()> {
        let params = &optimizer.params;
        let Some(bucket) = of_bucket.first().map(|own| own.bucket) else {
            return Ok(());
        };
        if bucket < params.layout().buckets.len() {
            optimizer.change_bucket(bucket, |part, kinds| {
                for own in of_bucket.iter().filter(|own| own.is_in(part)) {
                    let piece = own.view.clone();
                    for kind in kinds(own.param)? {
                        let values = self.read(kind.name, &piece)?;
                        let part = kind.part(own.start, own.len())?;
                        let values = Tensor::from_vec(values, own.len(), part.device())?;
                        part.slice_set(&values, 0, 0)?;
                    }
                }
                Ok(())
            })?;
        }
        // After the masters, of which bf16 weights are a part.
        if params.sharded().is_none() {
            return Ok(());
        }
        let has_weights = |own: &OwnValues| {
            let param = params.get(own.param);
            self.kind(&param.name, param.trainable).is_some()
        };
        if !of_bucket.iter().any(has_weights) {
            return Ok(());
        }
        params.change_weights(bucket, || {
            for own in of_bucket {
                let piece = own.view.clone();
                if let Some(values) = self.weights(params, own.param, &piece)? {
                    own.weights(params)?.slice_set(&values, 0, 0)?;
                }
            }
            Ok(())
        })
    }

    fn save_source(&self, name: &str) -> SaveSource {
        let params = &self.manifest.params;
        let found = params.iter().find(|record| record.name == name);
        found.map_or(SaveSource::Source, |record| record.save_source)
    }

    /// The weights of a piece, flat, in the type and on the device of the parameter; `None` if they are those of its source.
    fn weights(&self, params: &Parameters, index: usize, piece: &View) -> Result<Option<Tensor>> {
        let param = params.get(index);
        let values = match self.kind(&param.name, param.trainable) {
            Some(kind) => self.read(kind, piece)?,
            None => return Ok(None),
        };
        if param.is_in_blocks() {
            bail!(
                "the checkpoint {} has values of the frozen parameter {}, which the model holds in blocks ({}): these cannot be read into \
                 blocks\nhint: resume without a format of frozen weights, or with one of 16 bits",
                self.dir().display(),
                param.name,
                param.form()
            );
        }
        let values = Tensor::from_vec(values, piece.len(), &Device::Cpu)?;
        let values = values.to_dtype(param.dtype())?;
        Ok(Some(values.to_device(param.var().device())?))
    }

    /// The kind of values that a parameter has here; `None`: those of its source.
    pub(super) fn kind(&self, name: &str, trainable: bool) -> Option<&'static str> {
        let is_refilled = self.save_source(name) == SaveSource::Refill;
        match (trainable, self.has(WEIGHT, name)) {
            (true, true) if is_refilled => Some(WEIGHT),
            (true, _) => Some(MASTER),
            (false, true) => Some(WEIGHT),
            (false, false) if is_refilled => Some(WEIGHT),
            (false, false) => None,
        }
    }

    /// Whether there are values of this kind for a parameter.
    fn has(&self, kind: &str, name: &str) -> bool {
        let mut pieces = self.pieces.get(name).into_iter().flatten();
        pieces.any(|(file, piece)| {
            let tensor = self.files[*file].tensor(&tensor_name(kind, piece), piece.len());
            matches!(tensor, Ok(Some(_)))
        })
    }

    /// The values of a kind that a piece has, from all files with some of them.
    pub(super) fn read(&self, kind: &str, wanted: &View) -> Result<Vec<f32>> {
        let mut values = vec![0f32; wanted.len()];
        let mut found = Vec::new();
        for (file, piece) in self.pieces.get(&wanted.name).into_iter().flatten() {
            let name = tensor_name(kind, piece);
            let Some((dtype, bytes)) = self.files[*file].tensor(&name, piece.len())? else {
                continue;
            };
            let dtype = DType::try_from(dtype)?;
            let size = dtype.size_in_bytes();
            for common in wanted.common(piece) {
                let from = common.other_start * size..(common.other_start + common.len) * size;
                let to = &mut values[common.start..common.start + common.len];
                decode(dtype, &bytes[from], to);
                found.push(common.start..common.start + common.len);
            }
        }
        found.sort_by_key(|range| range.start);
        let is_once = found.windows(2).all(|pair| pair[0].end <= pair[1].start);
        let num_found: usize = found.iter().map(Range::len).sum();
        if !is_once {
            bail!(
                "the checkpoint {} has values of {kind} of parameter {} twice: its files do not belong together",
                self.dir().display(),
                wanted.name
            );
        }
        if num_found != wanted.len() {
            bail!(
                "the checkpoint {} has {num_found} of the {} values of {kind} of parameter {} that are needed",
                self.dir().display(),
                wanted.len(),
                wanted.name
            );
        }
        if !values.iter().all(|value| value.is_finite()) {
            bail!(
                "{kind} of parameter {} in the checkpoint {} has values that are NaN or infinite",
                wanted.name,
                self.dir().display()
            );
        }
        Ok(values)
    }
}
