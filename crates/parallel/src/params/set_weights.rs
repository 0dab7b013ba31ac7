//! Weights that a program writes: [`Parameters::set`], which optimizers follow, and what is written past it.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use candle_comm::Mesh;
use candle_core::{DType, Result, Tensor, bail};
use candle_ops::{sum_into, sum_of_squares_into};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash64;

use super::changes::SaveSource;
use super::parameters::Parameters;
use crate::agreement::gather;
use crate::checksums::checksum;
use crate::placement::{intersect, offset_by};

/// Weights that a program has set, and the optimizers that update them, of one store: several models may share its parameters.
#[derive(Default)]
pub(super) struct SetWeights {
    state: Mutex<SetState>,
    /// How often weights were written in a way that is known.
    num_writes: AtomicU64,
}

#[derive(Default)]
struct SetState {
    /// By parameter, what was set and an optimizer's masters do not have yet.
    ahead_of_masters: BTreeMap<String, SetValues>,
    /// By parameter, a hash of the values that were set since the last update.
    since_update: BTreeMap<String, u64>,
    /// Optimizers.
    claims: Vec<Weak<Claim>>,
    /// Counts optimizers and their updates.
    clock: u64,
}

/// An optimizer, while it lives.
pub(crate) struct Claim {
    /// The parameters that it updates on this rank.
    names: BTreeSet<String>,
    /// The model that it was made for.
    model: usize,
    made: u64,
    updated: AtomicU64,
}

/// Values to which a part of a parameter was set.
pub(crate) struct SetValues {
    /// Places in the local values.
    pub range: Range<usize>,
    /// Flat, in f32.
    values: Tensor,
    /// Whether they were given in the parameter's type.
    is_narrow: bool,
    /// The bf16 weights before, which are the masters' rounding.
    before: Option<Tensor>,
}

impl SetWeights {
    /// Notes that weights are written.
    pub fn note_write(&self) {
        self.num_writes.fetch_add(1, Ordering::Relaxed);
    }

    /// Forgets what a parameter was set to: it has other values since.
    pub fn forget(&self, name: &str) {
        self.lock().ahead_of_masters.remove(name);
    }

    fn lock(&self) -> MutexGuard<'_, SetState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SetValues {
    /// What masters become at `places` of the parameter, in f32: `masters` are there now, which weights of type `dtype` go with, a part
    /// of them if `are_joined`. Those whose rounding was set stay.
    pub fn masters(
        &self,
        places: &Range<usize>,
        masters: &Tensor,
        (dtype, are_joined): (DType, bool),
    ) -> Result<Tensor> {
        let mine = |values: &Tensor| {
            let values = values.narrow(0, places.start - self.range.start, places.len())?;
            values.force_contiguous()?.to_device(masters.device())
        };
        let values = mine(&self.values)?;
        let rounded = match &self.before {
            _ if !self.is_narrow => None,
            Some(before) if are_joined => Some(mine(before)?),
            None if are_joined => None,
            _ => Some(masters.to_dtype(dtype)?),
        };
        match rounded {
            None => Ok(values),
            Some(rounded) => {
                let stay = rounded.to_dtype(DType::F32)?.eq(&values)?;
                stay.where_cond(masters, &values)
            }
        }
    }
}

/// Weights of a bucket that this rank updates, as they were left.
pub(crate) struct SeenWeights {
    bucket: usize,
    /// Which of those that this rank updates.
    part: Range<usize>,
    num_writes: u64,
    /// The sum of the squares of each parameter.
    squares: Tensor,
}

/// How far weights are from what they were left as, by parameter of a bucket.
pub(crate) struct WrittenWeights {
    bucket: usize,
    distances: Tensor,
}

/// The parameters that a rank has set since the last update, by name, and its place in the pipeline and the tensor-parallel group.
#[derive(Serialize, Deserialize)]
struct Said {
    place: (usize, usize),
    set: BTreeMap<String, u64>,
}

impl Parameters {
    /// Writes parameter `index`: `values` in f32 or in the parameter's type, in its
    /// [local shape](super::Param::local_shape), as [`Self::values`] gives them. This is the one way to write a weight that is
    /// right on every layout: it waits for updates that are on their way, every tensor that layers hold has the values,
    /// and the optimizer goes on from them, in f32 where it has masters: a master stays whose rounding is the value, if
    /// that is given in the parameter's type. The optimizer's other state stays. Every data-parallel rank must set the same
    /// values in the same step; that is compared in the next update. With ZeRO-3 each rank keeps its slice.
    ///
    /// ```
    /// # use candle_core::{Result, Tensor};
    /// # use candle_parallel::{DistributedOptimizer, Parameters};
    /// /// Moves the weights to their average, and keeps what they were for the way back.
    /// fn use_average(
    ///     params: &Parameters,
    ///     optimizer: &DistributedOptimizer,
    ///     average: &[Tensor],
    /// ) -> Result<Vec<Tensor>> {
    ///     let mut before = Vec::new();
    ///     for (index, average) in average.iter().enumerate() {
    ///         before.push(optimizer.values_f32(index)?);
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
        let ahead = self.ahead_of_masters(index, &values, is_wide)?;
        self.refill(index, &values.to_dtype(param.dtype())?)?;
        if !param.trainable {
            return Ok(());
        }
        self.set_save_source(index, SaveSource::Update);
        let groups = self.groups();
        let sum = match groups.shard.world_size() * groups.replicate.world_size() {
            1 => 0,
            _ => checksum(&values)?,
        };
        let mut state = self.set_weights().lock();
        state.since_update.insert(param.name.clone(), sum);
        if let Some(ahead) = ahead {
            state.ahead_of_masters.insert(param.name.clone(), ahead);
        }
        Ok(())
    }

    /// What masters will have to know of values to which parameter `index` is about to be set, if there may be some.
    fn ahead_of_masters(
        &self,
        index: usize,
        values: &Tensor,
        is_wide: bool,
    ) -> Result<Option<SetValues>> {
        let param = self.get(index);
        let place = self.layout().slot(index).filter(|_| param.trainable);
        let Some((place, bucket, slot)) = place.filter(|_| param.dtype() != DType::F32) else {
            return Ok(None);
        };
        let mut state = self.set_weights().lock();
        let mut living = state.claims.iter().filter_map(Weak::upgrade);
        let is_of_other =
            |claim: Arc<Claim>| claim.model != self.address() && claim.names.contains(&param.name);
        // The other model's optimizer may update other slices.
        let mine = if living.any(is_of_other) {
            slot.range.clone()
        } else {
            intersect(&slot.range, &self.groups().own_range(bucket.len))
        };
        if mine.is_empty() {
            return Ok(None);
        }
        let range = offset_by(&mine, slot.range.start);
        let earlier = state.ahead_of_masters.remove(&param.name);
        let is_here = param.is_present() || self.sharded().is_some();
        let before = match earlier {
            Some(earlier) => earlier.before.filter(|_| earlier.range == range),
            None if param.dtype() == DType::BF16 && is_here => {
                let before = self.own_weights(place, slot, &mine)?;
                Some(before.force_contiguous()?)
            }
            None => None,
        };
        let values = values.flatten_all()?.narrow(0, range.start, range.len())?;
        Ok(Some(SetValues {
            values: values.to_dtype(DType::F32)?.force_contiguous()?,
            is_narrow: !is_wide,
            range,
            before,
        }))
    }

    /// Takes what was set and no masters have, by parameter of this model.
    pub(crate) fn take_ahead_of_masters(&self) -> BTreeMap<usize, SetValues> {
        let mut state = self.set_weights().lock();
        if state.ahead_of_masters.is_empty() {
            return BTreeMap::new();
        }
        let own = self.iter().enumerate();
        own.filter_map(|(index, param)| Some((index, state.ahead_of_masters.remove(&param.name)?)))
            .collect()
    }

    /// A hash of what was set since the last update.
    pub(crate) fn set_since_update(&self) -> u64 {
        let mut hasher = XxHash64::default();
        self.set_weights().lock().since_update.hash(&mut hasher);
        hasher.finish()
    }

    /// Says that an update is made.
    pub(crate) fn forget_set(&self) {
        self.set_weights().lock().since_update.clear();
    }

    /// An error on every rank that names the first parameter which two data-parallel ranks have set to other values, or
    /// one of them has not set. Every rank must call it.
    pub(crate) fn blame_set(&self, mesh: &Mesh) -> Result<()> {
        let set = self.set_weights().lock().since_update.clone();
        let own = Said {
            place: (mesh.pp.rank(), mesh.tp.rank()),
            set,
        };
        let all: Vec<Said> = gather(&mesh.world, &own)?;
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

    /// Says that an optimizer is made for these parameters, and lives as long as what is returned.
    pub(crate) fn claim_for_optimizer(&self) -> Arc<Claim> {
        let trained = self.iter().filter(|param| param.trainable);
        let mut state = self.set_weights().lock();
        state.clock += 1;
        let claim = Arc::new(Claim {
            names: trained.map(|param| param.name.clone()).collect(),
            model: self.address(),
            made: state.clock,
            updated: AtomicU64::new(0),
        });
        state.claims.retain(|claim| claim.strong_count() > 0);
        state.claims.push(Arc::downgrade(&claim));
        claim
    }

    /// Says that an optimizer makes an update.
    ///
    /// # Errors
    /// Another living one has made an update of the same parameters since this one was made.
    pub(crate) fn claim_update(&self, own: &Claim) -> Result<()> {
        let mut state = self.set_weights().lock();
        for other in state.claims.iter().filter_map(Weak::upgrade) {
            let is_own = std::ptr::eq(&*other, own);
            if is_own || other.updated.load(Ordering::Relaxed) <= own.made {
                continue;
            }
            if let Some(name) = other.names.intersection(&own.names).next() {
                bail!(
                    "two living optimizers update parameter {name}: another one has updated it since this one was made, and neither knows of the other's \
                     masters and state\nhint: one DistributedOptimizer for all steps, or drop(optimizer) before the next one is made; \
                     ParamGroup::with_rule gives some parameters another rule"
                );
            }
        }
        state.clock += 1;
        own.updated.store(state.clock, Ordering::Relaxed);
        Ok(())
    }

    /// Remembers `part` of the weights of bucket `index` that this rank updates; `None` if they are not all here, as
    /// with ZeRO-3, where nobody can write to them.
    pub(crate) fn see_weights(
        &self,
        index: usize,
        part: Range<usize>,
    ) -> Result<Option<SeenWeights>> {
        let num_writes = self.set_weights().num_writes.load(Ordering::Relaxed);
        let squares = self.squares(index, &part)?;
        Ok(squares.map(|squares| SeenWeights {
            bucket: index,
            part,
            num_writes,
            squares,
        }))
    }

    /// How far the weights are from what was seen of them; `None` if they were written in a way that is known.
    pub(crate) fn written_since(&self, seen: &SeenWeights) -> Result<Option<WrittenWeights>> {
        if seen.num_writes != self.set_weights().num_writes.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let Some(now) = self.squares(seen.bucket, &seen.part)? else {
            return Ok(None);
        };
        Ok(Some(WrittenWeights {
            bucket: seen.bucket,
            distances: (now - &seen.squares)?.abs()?,
        }))
    }

    /// The sum of the squares of each parameter of a bucket, of `part` of what this rank updates.
    fn squares(&self, index: usize, part: &Range<usize>) -> Result<Option<Tensor>> {
        let bucket = &self.layout().buckets[index];
        let mut slots = bucket.slots.iter();
        if self.sharded().is_some() || !slots.all(|slot| self.get(slot.param).is_present()) {
            return Ok(None);
        }
        let start = self.groups().own_range(bucket.len).start;
        let part = start + part.start..start + part.end;
        let device = self.groups().shard.device();
        let squares = Tensor::zeros(bucket.slots.len().max(1), DType::F64, device)?;
        for (place, slot) in bucket.slots.iter().enumerate() {
            let mine = intersect(&slot.range, &part);
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
