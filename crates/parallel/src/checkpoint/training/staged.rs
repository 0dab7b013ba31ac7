//! A copy of what a rank writes, in the host's memory, so that training goes on while a thread writes it.

use std::collections::HashSet;

use candle_core::{Device, Result, Tensor, bail};

use super::own_values::{OwnValues, written_values};
use super::piece::Piece;
use crate::memory::{MemoryCategory, MemoryGuard, num_bytes};
use crate::optimizer::{DistributedOptimizer, MASTER};
use crate::params::{Parameters, SaveSource};

/// The model's weights in their own type, of parameters that were refilled, and of frozen ones that no file has.
pub(super) const WEIGHT: &str = "weight";

/// The tensors of a rank's file.
pub(super) struct Staged {
    pub tensors: Vec<StagedTensor>,
    pub pieces: Vec<Piece>,
    /// Until it is written.
    _held: Vec<MemoryGuard>,
}

pub(super) struct StagedTensor {
    pub name: String,
    /// Flat, on the host.
    pub values: Tensor,
}

/// The name of a tensor in its file.
pub(super) fn tensor_name(kind: &str, piece: &Piece) -> String {
    let Piece { name, range, .. } = piece;
    format!("{kind}:{name}[{}..{}]", range.start, range.end)
}

impl Staged {
    /// What this rank writes. `has_weights` tells of each local parameter whether its weights are written in their own type.
    ///
    /// # Errors
    /// A weight that is to be written and is packed, memory that is missing, and what reading from devices and the optimizer's file returns.
    pub fn new(optimizer: &DistributedOptimizer, has_weights: &[bool]) -> Result<Self> {
        let params = optimizer.params();
        params.wait_for_updates()?;
        for (param, _) in params.iter().zip(has_weights).filter(|(_, has)| **has) {
            if param.is_packed() {
                bail!(
                    "the frozen parameter {} is held as {}, and no file has its values: a checkpoint could not give them back\nhint: \
                     leave the format of frozen weights out, or begin with a model from files",
                    param.name,
                    param.form()
                );
            }
        }
        let mut staged = Self {
            tensors: Vec::new(),
            pieces: Vec::new(),
            _held: Vec::new(),
        };
        let written = written_values(params);
        for of_bucket in written.chunk_by(|a, b| a.bucket == b.bucket) {
            let Some(bucket) = of_bucket.first().map(|own| own.bucket) else {
                continue;
            };
            if bucket >= params.layout().buckets.len() {
                for own in of_bucket.iter().filter(|own| has_weights[own.param]) {
                    let piece = staged.piece(params, own);
                    staged.push(params, WEIGHT, &piece, &own.weights(params)?)?;
                }
                continue;
            }
            optimizer.read_bucket(bucket, |kinds| {
                for own in of_bucket {
                    let piece = staged.piece(params, own);
                    let mut has_master = false;
                    for kind in kinds(own.param)? {
                        has_master |= kind.name == MASTER;
                        let values = kind.part(own.start, own.len())?;
                        staged.push(params, kind.name, &piece, &values)?;
                    }
                    let kind = match (has_master, has_weights[own.param]) {
                        (false, _) => MASTER,
                        (true, true) => WEIGHT,
                        (true, false) => continue,
                    };
                    staged.push(params, kind, &piece, &own.weights(params)?)?;
                }
                Ok(())
            })?;
        }
        Ok(staged)
    }

    fn piece(&mut self, params: &Parameters, own: &OwnValues) -> Piece {
        let piece = Piece::of(params.get(own.param), own.local.clone());
        self.pieces.push(piece.clone());
        piece
    }

    fn push(
        &mut self,
        params: &Parameters,
        kind: &str,
        piece: &Piece,
        values: &Tensor,
    ) -> Result<()> {
        let values = values.force_contiguous()?.to_device(&Device::Cpu)?;
        let bytes = num_bytes(&values);
        self._held
            .push(params.meter().hold(MemoryCategory::Buffers, bytes));
        self.tensors.push(StagedTensor {
            name: tensor_name(kind, piece),
            values,
        });
        Ok(())
    }
}

/// Of each local parameter, whether neither masters nor a file have its values: those of a caller of [`Parameters::refill`] on any rank,
/// and frozen ones that began as random numbers. `save_sources` is of the catalog.
pub(super) fn written_weights(params: &Parameters, save_sources: &[SaveSource]) -> Vec<bool> {
    let has_file = params.checkpoint().is_some();
    let entries = params.catalog().iter().zip(save_sources);
    let written: HashSet<&str> = entries
        .filter(|(entry, from)| **from == SaveSource::Refill || !has_file && !entry.trainable)
        .map(|(entry, _)| entry.name.as_str())
        .collect();
    let all = params.iter();
    all.map(|param| written.contains(param.name.as_str()))
        .collect()
}
