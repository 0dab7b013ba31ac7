//! What a rank writes of a model and its optimizer, tensor by tensor.

use std::collections::HashSet;

use candle_core::{DType, Device, Result, Tensor, bail};

use super::own_values::{OwnValues, written_values};
use crate::memory::{MemoryCategory, MemoryGuard, num_bytes};
use crate::optimizer::{DistributedOptimizer, MASTER};
use crate::params::{Parameters, SaveSource};
use crate::view::View;

/// The model's weights in their own type, of parameters that were refilled, and of frozen ones that no file has.
pub(super) const WEIGHT: &str = "weight";

/// The tensors of a rank's file, in its order.
pub(super) struct RankTensors {
    pub tensors: Vec<RankTensor>,
    pub pieces: Vec<View>,
}

/// One of them; its values are flat.
pub(super) struct RankTensor {
    pub name: String,
    pub dtype: DType,
    pub len: usize,
    own: OwnValues,
    /// `None`: the weights themselves.
    state: Option<&'static str>,
}

/// A copy of the values in the host's memory, so that training goes on while they are written.
pub(super) struct StagedTensor {
    pub name: String,
    pub values: Tensor,
    /// Until they are written.
    _held: MemoryGuard,
}

/// The name of a tensor in its file.
pub(super) fn tensor_name(kind: &str, piece: &View) -> String {
    let View { name, range, .. } = piece;
    format!("{kind}:{name}[{}..{}]", range.start, range.end)
}

impl RankTensors {
    /// What this rank writes. `has_weights` tells of each local parameter whether its weights are written in their own type.
    ///
    /// # Errors
    /// A weight that is to be written and is packed.
    pub fn new(optimizer: &DistributedOptimizer, has_weights: &[bool]) -> Result<Self> {
        let params = &optimizer.params;
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
        let mut all = Self {
            tensors: Vec::new(),
            pieces: Vec::new(),
        };
        for own in written_values(optimizer) {
            let is_trained = own.bucket < params.layout().buckets.len();
            let kinds = match is_trained {
                true => optimizer.kind_names(own.bucket, own.param),
                false => Vec::new(),
            };
            let has_master = !is_trained || kinds.contains(&MASTER);
            let weights = match (has_master, has_weights[own.param]) {
                (false, _) => Some(MASTER),
                (true, true) => Some(WEIGHT),
                (true, false) => None,
            };
            if !is_trained && weights.is_none() {
                continue;
            }
            let param = params.get(own.param);
            let piece = own.view.clone();
            let state = kinds.iter().map(|&kind| (kind, DType::F32, Some(kind)));
            let weights = weights.map(|kind| (kind, param.dtype(), None));
            for (kind, dtype, state) in state.chain(weights) {
                all.tensors.push(RankTensor {
                    name: tensor_name(kind, &piece),
                    dtype,
                    len: own.len(),
                    own: own.clone(),
                    state,
                });
            }
            all.pieces.push(piece);
        }
        Ok(all)
    }

    /// Lets `see` have the values of one tensor after the other, in the host's memory. What is away comes and goes part by part.
    ///
    /// # Errors
    /// What reading from devices and the optimizer's files returns, and what `see` does.
    pub fn read(
        &self,
        optimizer: &DistributedOptimizer,
        mut see: impl FnMut(&RankTensor, Tensor) -> Result<()>,
    ) -> Result<()> {
        let params = &optimizer.params;
        params.wait_for_updates()?;
        let mut see = |tensor: &RankTensor, values: Tensor| {
            see(tensor, values.force_contiguous()?.to_device(&Device::Cpu)?)
        };
        let of_buckets = self.tensors.chunk_by(|a, b| a.own.bucket == b.own.bucket);
        for of_bucket in of_buckets {
            let Some(bucket) = of_bucket.first().map(|tensor| tensor.own.bucket) else {
                continue;
            };
            let mut left = of_bucket;
            let is_trained = bucket < params.layout().buckets.len();
            let read = match is_trained {
                true => optimizer.read_bucket(bucket, |part, kinds| {
                    // They are in the order of the parts.
                    let num_here = left.iter().take_while(|tensor| tensor.own.is_in(part));
                    let (here, later) = left.split_at(num_here.count());
                    left = later;
                    here.iter().try_for_each(|tensor| {
                        let RankTensor { own, state, .. } = tensor;
                        let values = match state {
                            None => own.weights(params)?,
                            Some(name) => {
                                let kinds = kinds(own.param)?;
                                match kinds.iter().find(|kind| kind.name == *name) {
                                    Some(kind) => kind.part(own.start, own.len())?,
                                    None => bail!("the optimizer has no {}", tensor.name),
                                }
                            }
                        };
                        see(tensor, values)
                    })
                }),
                false => of_bucket
                    .iter()
                    .try_for_each(|tensor| see(tensor, tensor.own.weights(params)?)),
            };
            if let Some(sharded) = params.sharded() {
                sharded.slices.free(bucket)?;
            }
            read?;
            if let Some(tensor) = left.first().filter(|_| is_trained) {
                bail!("{} is in no part of its bucket", tensor.name);
            }
        }
        Ok(())
    }

    /// Copies of all.
    ///
    /// # Errors
    /// Memory that is missing, and what [`Self::read`] returns.
    pub fn stage(&self, optimizer: &DistributedOptimizer) -> Result<Vec<StagedTensor>> {
        let meter = optimizer.params.meter();
        let mut staged = Vec::with_capacity(self.tensors.len());
        self.read(optimizer, |tensor, values| {
            staged.push(StagedTensor {
                name: tensor.name.clone(),
                _held: meter.hold(MemoryCategory::Buffers, num_bytes(&values)),
                values,
            });
            Ok(())
        })?;
        Ok(staged)
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
