//! Weights that a program writes: [`Parameters::set`], which optimizers follow, and what is written past it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use candle_comm::Mesh;
use candle_core::{DType, Error, Result, Tensor, bail};
use candle_ops::{sum_into, sum_of_squares_into};
use serde::{Deserialize, Serialize};

use super::changes::SaveSource;
use super::parameters::Parameters;
use crate::checksums::checksum;
use crate::placement::intersect;

/// What a program has written, and who updates the weights.
#[derive(Default)]
pub(super) struct SetWeights {
    state: Mutex<State>,
    /// How often weights were written in a way that is known.
    num_writes: AtomicU64,
}

#[derive(Default)]
struct State {
    /// By parameter, what this rank updates of values in f32 that an optimizer has no masters of yet.
    ahead_of_masters: BTreeMap<usize, Tensor>,
    /// By parameter, a hash of the values that were set since the last update.
    since_update: BTreeMap<usize, u64>,
    /// The optimizer, while it lives.
    optimizer: Weak<()>,
}

impl SetWeights {
    /// Notes that weights are written.
    pub fn note_write(&self) {
        self.num_writes.fetch_add(1, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The weights of a bucket that this rank updates, as they were left.
pub(crate) struct SeenWeights {
    bucket: usize,
    num_writes: u64,
    /// The sum of the squares of each parameter.
    squares: Tensor,
}

/// How far weights are from what they were left as, by parameter of a bucket.
pub(crate) struct WrittenWeights {
    bucket: usize,
    distances: Tensor,
}

/// What a rank has set since the last update, by name, and its place in the pipeline and the tensor-parallel group.
#[derive(Serialize, Deserialize)]
struct Said {
    place: (usize, usize),
    set: BTreeMap<String, u64>,
}

impl Parameters {
    /// Writes parameter `index`: `values` in f32 or in the parameter's type, in its
    /// [local shape](super::Param::local_shape), as [`Self::values`] gives them. This is the one way to write a weight that is
    /// right on every layout: it waits for updates that are on their way, every tensor that layers hold has the values,
    /// and the optimizer goes on from them, in f32 where it has masters. Its other state stays. Every data-parallel
    /// rank must set the same values in the same step; that is compared in the next update. With ZeRO-3 each rank keeps
    /// its slice.
    ///
    /// ```
    /// # use candle_core::{Result, Tensor};
    /// # use candle_parallel::Parameters;
    /// /// Moves the weights to their average, and keeps what they were for the way back.
    /// fn use_average(params: &Parameters, average: &[Tensor]) -> Result<Vec<Tensor>> {
    ///     let mut before = Vec::new();
    ///     for (index, average) in average.iter().enumerate() {
    ///         before.push(params.values(index)?.copy()?);
    ///         params.set(index, average)?;
    ///     }
    ///     Ok(before)
    /// }
    /// ```
    ///
    /// # Errors
    /// Values of another shape or type, a frozen weight that is held in fewer bits, an update that does not arrive.
    pub fn set(&self, index: usize, values: &Tensor) -> Result<()> {
        let param = self.get(index);
        let is_wide = values.dtype() == DType::F32;
        if values.shape() != param.local_shape() || !(is_wide || values.dtype() == param.dtype()) {
            bail!(
                "parameter {} cannot be set to {:?} values of shape {:?}; expected {:?} or F32 of shape {:?}, what this rank holds of it",
                param.name,
                values.dtype(),
                values.shape(),
                param.dtype(),
                param.local_shape()
            );
        }
        if param.is_packed() {
            bail!(
                "parameter {} is frozen and held as {}: its values cannot be set\nhint: leave ParamStore::with_frozen_format out",
                param.name,
                param.form()
            );
        }
        self.wait_for_updates()?;
        let values = values.detach().to_device(param.device())?;
        self.refill(index, &values.to_dtype(param.dtype())?)?;
        if !param.trainable {
            return Ok(());
        }
        self.set_save_source(index, SaveSource::Update);
        let mut state = self.set_weights().lock();
        state.since_update.insert(index, checksum(&values)?);
        if param.dtype() == DType::F32 {
            return Ok(());
        }
        let Some((_, bucket, slot)) = self.layout().slot(index) else {
            return Ok(());
        };
        let mine = intersect(&slot.range, &self.groups().own_range(bucket.len));
        if mine.is_empty() {
            return Ok(());
        }
        let values = values.flatten_all()?;
        let values = values.narrow(0, mine.start - slot.range.start, mine.len())?;
        let values = values.to_dtype(DType::F32)?.force_contiguous()?;
        state.ahead_of_masters.insert(index, values);
        Ok(())
    }

    /// Takes what this rank updates of values that were set and that no masters have, by parameter.
    pub(crate) fn take_ahead_of_masters(&self) -> BTreeMap<usize, Tensor> {
        std::mem::take(&mut self.set_weights().lock().ahead_of_masters)
    }

    /// A hash of what was set since the last update.
    pub(crate) fn set_since_update(&self) -> u64 {
        let state = self.set_weights().lock();
        let all = state.since_update.iter();
        all.fold(0, |hash: u64, (index, sum)| {
            hash.rotate_left(7) ^ sum.wrapping_add(*index as u64 + 1)
        })
    }

    /// Says that an update is made.
    pub(crate) fn forget_set(&self) {
        self.set_weights().lock().since_update.clear();
    }

    /// An error on every rank that names the first parameter which two data-parallel ranks have set to other values, or
    /// one of them has not set. Every rank must call it.
    pub(crate) fn blame_set(&self, mesh: &Mesh) -> Result<()> {
        let set = self.set_weights().lock().since_update.clone();
        let named = set.into_iter();
        let own = Said {
            place: (mesh.pp.rank(), mesh.tp.rank()),
            set: named
                .map(|(index, sum)| (self.get(index).name.clone(), sum))
                .collect(),
        };
        let own = serde_json::to_vec(&own).map_err(Error::wrap)?;
        let all = mesh.world.all_gather_bytes(&own)?;
        let all = all.iter().map(|bytes| serde_json::from_slice(bytes));
        let all: Vec<Said> = all
            .collect::<std::result::Result<_, _>>()
            .map_err(Error::wrap)?;
        for (rank, said) in all.iter().enumerate() {
            let mate = all.iter().position(|other| other.place == said.place);
            let mate = mate.unwrap_or(rank);
            let mut names = all[mate].set.keys().chain(said.set.keys());
            let Some(name) = names.find(|name| all[mate].set.get(*name) != said.set.get(*name))
            else {
                continue;
            };
            let what = match (all[mate].set.get(name), said.set.get(name)) {
                (Some(_), Some(_)) => format!("to other values on rank {mate} than on rank {rank}"),
                (Some(_), None) => format!("on rank {mate} and not on rank {rank}"),
                _ => format!("on rank {rank} and not on rank {mate}"),
            };
            bail!(
                "parameter {name} was set {what}, which hold the same of it\nhint: Parameters::set is called with the same values on every \
                 data-parallel rank, and not by one alone (`if rank == 0`)"
            );
        }
        Ok(())
    }

    /// Says that an optimizer updates these parameters while what is returned lives.
    pub(crate) fn claim_for_optimizer(&self) -> Result<Arc<()>> {
        let mut state = self.set_weights().lock();
        if state.optimizer.strong_count() > 0 {
            bail!(
                "a second optimizer is made for the parameters of one model, while the first one lives: both would update the same weights\n\
                 hint: one DistributedOptimizer for all steps; ParamGroup::with_rule gives some parameters another rule, and a new \
                 optimizer is made when the old one is dropped"
            );
        }
        let claim = Arc::new(());
        state.optimizer = Arc::downgrade(&claim);
        Ok(claim)
    }

    /// Remembers the weights of bucket `index` that this rank updates; `None` if they are not all here, as with ZeRO-3,
    /// where nobody can write to them.
    pub(crate) fn see_weights(&self, index: usize) -> Result<Option<SeenWeights>> {
        let num_writes = self.set_weights().num_writes.load(Ordering::Relaxed);
        let seen = |squares| SeenWeights {
            bucket: index,
            num_writes,
            squares,
        };
        Ok(self.squares(index)?.map(seen))
    }

    /// How far the weights are from what was seen of them; `None` if they were written in a way that is known.
    pub(crate) fn written_since(&self, seen: &SeenWeights) -> Result<Option<WrittenWeights>> {
        if seen.num_writes != self.set_weights().num_writes.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let Some(now) = self.squares(seen.bucket)? else {
            return Ok(None);
        };
        Ok(Some(WrittenWeights {
            bucket: seen.bucket,
            distances: (now - &seen.squares)?.abs()?,
        }))
    }

    /// The sum of the squares of what this rank updates of each parameter of a bucket.
    fn squares(&self, index: usize) -> Result<Option<Tensor>> {
        let bucket = &self.layout().buckets[index];
        let mut slots = bucket.slots.iter();
        if self.sharded().is_some() || !slots.all(|slot| self.get(slot.param).is_present()) {
            return Ok(None);
        }
        let own = self.groups().own_range(bucket.len);
        let device = self.groups().shard.device();
        let squares = Tensor::zeros(bucket.slots.len().max(1), DType::F64, device)?;
        for (place, slot) in bucket.slots.iter().enumerate() {
            let mine = intersect(&slot.range, &own);
            if !mine.is_empty() {
                let weights = self.own_weights(index, slot, &mine)?;
                sum_of_squares_into(&squares.narrow(0, place, 1)?, false, &weights)?;
            }
        }
        Ok(Some(squares))
    }

    /// The error, on every rank, for weights that were found to be written past [`Self::set`] on any; `written` is what
    /// this rank has found. Every rank must call it.
    pub(crate) fn blame_written(
        &self,
        mesh: &Mesh,
        written: Option<&WrittenWeights>,
    ) -> Result<()> {
        let mut names = Vec::new();
        if let Some(written) = written {
            let slots = &self.layout().buckets[written.bucket].slots;
            let distances = written.distances.to_vec1::<f64>()?;
            let changed = slots
                .iter()
                .zip(distances)
                .filter(|(_, distance)| *distance > 0.0);
            names.extend(changed.map(|(slot, _)| self.get(slot.param).name.as_str()));
        }
        let own = names.first().copied().unwrap_or_default();
        let all = mesh.world.all_gather_bytes(own.as_bytes())?;
        let Some((rank, name)) = all.iter().enumerate().find(|(_, name)| !name.is_empty()) else {
            return Ok(());
        };
        bail!(
            "the values of parameter {} were written on rank {rank} between two updates: other ranks, the optimizer's masters and updates on \
             their way would not have them\nhint: Parameters::set writes a weight on every layout; what Parameters::values gives is for \
             reading, and is copied before it is changed",
            String::from_utf8_lossy(name)
        )
    }
}

impl WrittenWeights {
    /// The distance of all, one value on the device.
    pub fn distance(&self) -> Result<Tensor> {
        let sum = Tensor::zeros(1, DType::F64, self.distances.device())?;
        sum_into(&sum, false, &self.distances)?;
        Ok(sum)
    }
}
