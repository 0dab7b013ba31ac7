//! The parameters of a finished model: what this rank holds, and what the model asks for.

use std::ops::Range;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use candle_comm::{Mesh, ProcessGroup};
use candle_core::{Result, Tensor};

use super::allowance::Allowance;
use super::changes::SaveSource;
use super::layout::{ParamLayout, Slot};
use super::model_spec::ModelSpec;
use super::packed_weights::PackedWeights;
use super::param::Param;
use super::param_spec::ParamSpec;
use super::pending_weights::PendingWeights;
use super::rank_spec::RankSpec;
use super::replica_groups::ReplicaGroups;
use super::set_weights::SetWeights;
use super::sharded_weights::ShardedWeights;
use super::slices::gather_range;
use super::source::Source;
use super::tie::Tie;
use crate::agreement::Facts;
use crate::data_parallel::DataParallel;
use crate::files::Checkpoint;
use crate::lora::LoraConfig;
use crate::memory::{MemoryGuard, MemoryMeter};
use crate::offload::{Lane, Offload, OffloadPlace, Stored, WaitingStore};
use crate::pipeline_layout::PipelineLayout;
use crate::placement::{HeldRange, intersect, offset_by};

/// All parameters of a model, in name order; immutable but for their values.
#[derive(Clone)]
pub struct Parameters {
    inner: Arc<Inner>,
}

struct Inner {
    params: Vec<Param>,
    /// Row-major offsets of the local values of each that this rank owns.
    owned: Vec<Vec<Range<usize>>>,
    ties: Vec<Tie>,
    model: ModelSpec,
    /// What this rank has of it.
    own: RankSpec,
    common: StoreParts,
    allowance: Allowance,
    groups: ReplicaGroups,
    offload: Offload,
    meter: MemoryMeter,
    /// Activations that are away between passes, if they are.
    waiting: Option<Arc<WaitingStore>>,
    /// Of each parameter whose values are in memory.
    held: Mutex<Vec<Option<MemoryGuard>>>,
    /// Where the values of each are from.
    changes: Mutex<Vec<SaveSource>>,
    /// Updates that an optimizer has made, on which dropout depends.
    num_updates: AtomicUsize,
}

/// All models that are built from one store have these in common.
#[derive(Clone)]
pub(super) struct StoreParts {
    pub source: Arc<Source>,
    pub pending: Arc<PendingWeights>,
    pub set_weights: Arc<SetWeights>,
    /// Empty unless replicas divide the weights. Layers that use their weights tile by tile have it too.
    pub sharded: Arc<OnceLock<ShardedWeights>>,
    pub packed: Arc<PackedWeights>,
}

/// What a store knows of a model whose blocks have all been built.
pub(super) struct Requested {
    pub params: Vec<Param>,
    /// What its stages have asked for, in the same order.
    pub specs: Vec<ParamSpec>,
    pub common: StoreParts,
    pub allowance: Allowance,
    pub replicas: DataParallel,
    pub offload: Offload,
    pub without_values: bool,
}

impl Parameters {
    pub(super) fn new(
        requested: Requested,
        mesh: &Mesh,
        layout: &PipelineLayout,
        mut facts: Facts,
    ) -> Result<Self> {
        let Requested {
            mut params,
            specs,
            common,
            allowance,
            replicas,
            offload,
            without_values,
        } = requested;
        let StoreParts {
            source, sharded, ..
        } = &common;
        replicas.validate(mesh.replicas.world_size())?;
        let on_gpu = !mesh.world.device().is_cpu();
        let place = offload.place_of_params(mesh.world.rank(), on_gpu);
        let offloads_weights = place != OffloadPlace::Device;
        offload.validate(&replicas, on_gpu)?;
        facts.add("data parallelism", format!("{replicas:?}"));
        facts.add("whether weights are offloaded", offloads_weights);
        if mesh.world.world_size() > 1 {
            facts.extend(source.facts()?);
        }
        Facts::agree(
            &mesh.world,
            Ok(facts),
            Facts::clone,
            "ranks build different models",
            "give every rank the same model, seed and settings; ranks differ only in their place in the mesh and, with data \
             parallelism, in their data",
        )?;
        let model = ModelSpec::exchange(specs, layout, mesh, replicas.slot_alignment())?;
        let own = model.of_rank(mesh.world.rank());
        own.check_built(&params)?;
        let groups = ReplicaGroups::new(replicas, offloads_weights, mesh)?;
        for (param, held) in params.iter_mut().zip(&own.params) {
            param.is_tiled = held.is_tiled;
        }
        if let Some(checkpoint) = source.checkpoint() {
            let used = model.params().iter().map(|param| param.name.as_str());
            allowance.check_all_used(checkpoint, &used.collect())?;
        }
        let ties = Tie::connect(&model.tied_stages(), layout, &own.ties, mesh)?;
        let owned = params.iter().zip(&own.params).map(|(param, held)| {
            // What is packed is never written as it is held.
            match held.owned.is_empty() || param.packing.is_some() {
                true => Vec::new(),
                false => param.local_offsets(&held.owned),
            }
        });
        let owned = owned.collect();
        let places = &own.layout;
        let meter = MemoryMeter::default();
        common.packed.count_with(&meter);
        let waiting = offload.place_of_activations(mesh.world.rank(), on_gpu);
        let waiting = WaitingStore::new(
            waiting,
            offload.kept_activations,
            mesh.world.device(),
            &meter,
        )?;
        let initial = |param: &Param| {
            let values = source.values(&param.wanted())?;
            param.initial(values)?.to_device(mesh.world.device())
        };
        if without_values {
            // They stay where they are.
        } else if groups.shards_weights() {
            let again = || {
                candle_core::Error::msg(
                    "a second model is built from a parameter store whose weights replicas divide (ZeRO-3) or are offloaded\nhint: open a store \
                     for each model",
                )
            };
            if sharded.get().is_some() {
                return Err(again());
            }
            let slices = ShardedWeights::new(&params, places, &groups, (place, &meter), initial)?;
            sharded.set(slices).map_err(|_| again())?;
        } else {
            let mut absent = params.iter().filter(|param| !param.is_present());
            absent.try_for_each(|param| param.refill(&initial(param)?))?;
        }
        let held = params.iter().map(|param| param.count(&meter));
        Ok(Self {
            inner: Arc::new(Inner {
                waiting,
                held: Mutex::new(held.collect()),
                changes: Mutex::new(vec![SaveSource::default(); params.len()]),
                num_updates: AtomicUsize::new(0),
                meter,
                owned,
                own,
                params,
                ties,
                model,
                common,
                allowance,
                groups,
                offload,
            }),
        })
    }

    /// Whether these are the parameters of the same model, and not equal ones of another.
    pub(crate) fn are_those_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Tells the model from all others of this process.
    pub(super) fn address(&self) -> usize {
        Arc::as_ptr(&self.inner) as usize
    }

    /// The parameters of this rank, in name order.
    pub fn iter(&self) -> std::slice::Iter<'_, Param> {
        self.inner.params.iter()
    }

    /// Number of parameters of this rank.
    pub fn len(&self) -> usize {
        self.inner.params.len()
    }

    /// Whether this rank holds no parameter.
    pub fn is_empty(&self) -> bool {
        self.inner.params.is_empty()
    }

    /// Buckets of parameters, each of which is reduced and gathered as one.
    pub fn num_buckets(&self) -> usize {
        self.layout().buckets.len()
    }

    /// Parameter `index` of this rank.
    pub fn get(&self, index: usize) -> &Param {
        &self.inner.params[index]
    }

    /// What the model asks for, the same on every rank.
    pub fn model(&self) -> &ModelSpec {
        &self.inner.model
    }

    /// What this rank holds of the model.
    pub fn of_rank(&self) -> &RankSpec {
        &self.inner.own
    }

    /// Every parameter of the model, in name order, the same on every rank.
    pub fn catalog(&self) -> &[ParamSpec] {
        self.inner.model.params()
    }

    /// Number of values of the whole model; shared ones count once.
    pub fn num_global_values(&self) -> usize {
        self.catalog().iter().map(ParamSpec::num_values).sum()
    }

    /// Number of values of the whole model that are not frozen; shared ones count once.
    pub fn num_trainable_values(&self) -> usize {
        let trainable = self.catalog().iter().filter(|entry| entry.trainable);
        trainable.map(ParamSpec::num_values).sum()
    }

    /// Row-major offsets of the local values of parameter `index` that this rank owns: over a data-parallel replica, each value
    /// of the model is owned by exactly one rank.
    pub(crate) fn owned(&self, index: usize) -> &[Range<usize>] {
        &self.inner.owned[index]
    }

    /// The parts of parameter `index` that several tensor-parallel ranks hold, this one perhaps not among them.
    pub(crate) fn shared_ranges(&self, index: usize) -> &[HeldRange] {
        &self.inner.own.params[index].shared
    }

    /// Where gradients and the optimizer's state of the trainable parameters lie.
    pub(crate) fn layout(&self) -> &ParamLayout {
        &self.inner.own.layout
    }

    /// Updates on their way to this rank.
    pub(crate) fn pending(&self) -> &PendingWeights {
        &self.inner.common.pending
    }

    /// What a rank keeps away from its device: see [`ParamStore::with_offload`](crate::ParamStore::with_offload).
    pub fn offload(&self) -> &Offload {
        &self.inner.offload
    }

    /// How data-parallel replicas work together.
    pub fn data_parallel(&self) -> DataParallel {
        self.inner.groups.config
    }

    /// The data-parallel ranks between which [`DataParallel::zero`] divides; this rank alone if it divides nothing.
    pub fn shard_group(&self) -> &ProcessGroup {
        &self.inner.groups.shard
    }

    /// The ranks of [`Self::shard_group`], between which weights move [tile by tile](DataParallel::tile_linears).
    pub fn tile_group(&self) -> &ProcessGroup {
        &self.inner.groups.tiles
    }

    /// The ranks of [`Self::shard_group`] that divide a [second copy](DataParallel::zero_secondary) of the weights, if there is one.
    pub fn secondary_group(&self) -> Option<&ProcessGroup> {
        self.inner.groups.secondary.as_ref()
    }

    /// Between which ranks quantized gradients make their first and their second hop, if they make [two](crate::ReduceType::Int8): those of
    /// [`Self::secondary_group`], and one of each such group.
    pub fn hop_groups(&self) -> Option<&[ProcessGroup; 2]> {
        self.inner.groups.hops.as_ref()
    }

    /// The data-parallel ranks that hold the same slices as this one.
    pub fn copy_group(&self) -> &ProcessGroup {
        &self.inner.groups.replicate
    }

    /// The data-parallel ranks as a grid.
    pub(crate) fn groups(&self) -> &ReplicaGroups {
        &self.inner.groups
    }

    /// Where activations are between passes, if not on the device.
    pub(crate) fn waiting(&self) -> Option<&Arc<WaitingStore>> {
        self.inner.waiting.as_ref()
    }

    /// `xs`, away until a later pass uses it, if activations are.
    pub(crate) fn put_away(&self, lane: Lane, xs: Tensor) -> Result<Stored> {
        match self.waiting() {
            Some(waiting) => waiting.put(lane, xs),
            None => Ok(Stored::Here(xs)),
        }
    }

    /// Weights that stay packed.
    pub(crate) fn packed(&self) -> &PackedWeights {
        &self.inner.common.packed
    }

    /// The slices of weights, if replicas divide them.
    pub(crate) fn sharded(&self) -> Option<&ShardedWeights> {
        self.inner.common.sharded.get()
    }

    /// The local values of parameter `index`, outside of any graph, when all updates have arrived. If data-parallel ranks
    /// divide them (ZeRO-3) they are gathered: every rank of `mesh.replicas` must call this, and has this one parameter
    /// whole. They are for reading: [`Self::set`] writes.
    ///
    /// # Errors
    /// Values that were [released](Self::release), and failures of ranks.
    pub fn values(&self, index: usize) -> Result<Tensor> {
        let param = self.get(index);
        let slot = self.sharded().zip(self.layout().slot(index));
        let Some((sharded, (place, bucket, slot))) = slot else {
            return param.values();
        };
        let groups = self.groups();
        let (slices, own) = (groups.slices(bucket.len), sharded.slice(place)?);
        let mut values = gather_range(&slot.range, &slices, &own, &groups.shard)?;
        if groups.offloads_weights && groups.shard.world_size() == 1 {
            // What comes next takes the place of what has come.
            values = values.copy()?;
        }
        param.unpacked(values.reshape(param.local_shape())?)
    }

    /// The values of bucket `index` of [`ParamLayout::buckets`] that lie at `mine`, which is in a slot and in this rank's own
    /// range: flat, to be updated in place.
    pub(crate) fn own_weights(
        &self,
        index: usize,
        slot: &Slot,
        mine: &Range<usize>,
    ) -> Result<Tensor> {
        let Some(sharded) = self.sharded() else {
            let param = self.get(slot.param);
            return param.flat_part(&offset_by(mine, slot.range.start));
        };
        let own = self.groups().own_range(self.layout().buckets[index].len);
        let mine = offset_by(mine, own.start);
        sharded.slice(index)?.narrow(0, mine.start, mine.len())
    }

    /// Notes that weights are written to.
    pub(crate) fn note_write(&self) {
        self.set_weights().note_write();
    }

    /// Lets `change` write to what [`Self::own_weights`] gives of bucket `index`, of [`ParamLayout::all`].
    pub(crate) fn change_weights<T>(
        &self,
        index: usize,
        change: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        self.note_write();
        match self.sharded() {
            Some(sharded) => sharded.change(index, change),
            None => change(),
        }
    }

    /// An error that names the first of `params` whose values are not here for the pass of a block that was acquired.
    pub(crate) fn check_present(&self, params: &[usize]) -> Result<()> {
        let comes_by_tiles = |param: &Param| param.is_tiled && self.sharded().is_some();
        let mut params = params.iter().map(|&index| self.get(index));
        params.try_for_each(|param| match comes_by_tiles(param) {
            true => Ok(()),
            false => param.check_present(),
        })
    }

    /// The bytes that this rank holds.
    pub fn meter(&self) -> &MemoryMeter {
        &self.inner.meter
    }

    /// Counts the values of parameter `index` if they are in memory.
    fn count(&self, index: usize) {
        let held = self.inner.held.lock();
        let mut held = held.unwrap_or_else(PoisonError::into_inner);
        held[index] = None;
        held[index] = self.get(index).count(self.meter());
    }

    /// Waits for weights that other replicas updated and that are on their way: see [`DataParallel::overlap`](crate::DataParallel::overlap).
    ///
    /// # Errors
    /// An update does not arrive.
    pub fn wait_for_updates(&self) -> Result<()> {
        self.inner.common.pending.wait_for_all()
    }

    /// Frees the values of the parameters that block `block` uses and no block of `others` does; they stay in their place, and
    /// every read of them is an error, until [`Self::refill`]. So is reading an optimizer's masters of bf16 weights, of which these are a part.
    ///
    /// # Errors
    /// An update on its way does not arrive.
    pub fn release(&self, block: usize, others: &[usize]) -> Result<()> {
        let is_free = |param: &&Param| {
            param.blocks.contains(&block) && !param.blocks.iter().any(|b| others.contains(b))
        };
        for (index, param) in self.iter().enumerate().filter(|(_, param)| is_free(param)) {
            param.release()?;
            self.count(index);
        }
        Ok(())
    }

    /// Gives parameter `index`, which no replicas divide, other values, of its local shape.
    pub(crate) fn put(&self, index: usize, values: &Tensor) -> Result<()> {
        let param = self.get(index);
        self.set_weights().note_write();
        self.set_weights().forget(&param.name);
        param.refill(values)?;
        self.count(index);
        Ok(())
    }

    /// Puts values back into parameter `index`, which were [released](Self::release), behind every tensor that layers
    /// captured; `values` has its local shape, type and device. Other values are for [`Self::set`]: the next update
    /// goes on from these values, of bf16 weights up to half a unit in their last place, unless the optimizer has f32
    /// masters of the parameter, as of f16 weights: it then goes on from those. With ZeRO-3 each rank keeps its slice
    /// of the values, so all replicas put in the same.
    ///
    /// # Errors
    /// Values that do not fit the parameter.
    pub fn refill(&self, index: usize, values: &Tensor) -> Result<()> {
        let param = self.get(index);
        let slot = self.sharded().zip(self.layout().slot(index));
        let Some((sharded, (place, bucket, slot))) = slot else {
            self.put(index, values)?;
            self.set_save_source(index, SaveSource::Refill);
            return Ok(());
        };
        param.check_fits(values)?;
        sharded.free_all()?;
        self.set_weights().forget(&param.name);
        self.set_save_source(index, SaveSource::Refill);
        let own = self.groups().own_range(bucket.len);
        let mine = intersect(&slot.range, &own);
        if mine.is_empty() {
            return Ok(());
        }
        let values = values.flatten_all()?;
        let values = values.narrow(0, mine.start - slot.range.start, mine.len())?;
        let values = values.contiguous()?;
        sharded.change(place, || {
            let slice = sharded.slice(place)?;
            slice.slice_set(&values, 0, mine.start - own.start)
        })
    }

    pub(super) fn set_weights(&self) -> &SetWeights {
        &self.inner.common.set_weights
    }

    pub(super) fn changes(&self) -> MutexGuard<'_, Vec<SaveSource>> {
        let changes = self.inner.changes.lock();
        changes.unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn source(&self) -> &Source {
        &self.inner.common.source
    }

    pub(crate) fn ties(&self) -> &[Tie] {
        &self.inner.ties
    }

    /// The checkpoint that the model came from, if it did.
    pub fn checkpoint(&self) -> Option<&Checkpoint> {
        self.inner.common.source.checkpoint()
    }

    /// What adapters the model has.
    pub fn lora(&self) -> Option<&LoraConfig> {
        self.inner.common.source.lora()
    }

    /// The seed of what training passes draw at random.
    pub(crate) fn seed(&self) -> u64 {
        self.inner.common.source.seed()
    }

    /// How many updates an optimizer has made.
    pub(crate) fn num_updates(&self) -> &AtomicUsize {
        &self.inner.num_updates
    }

    /// Tensors that the checkpoint holds beside the parameters: (name, the parameter it repeats, if it does).
    pub(crate) fn extras(&self) -> Vec<(String, Option<String>)> {
        let Some(checkpoint) = self.checkpoint() else {
            return Vec::new();
        };
        let is_parameter = |name: &str| self.model().get(name).is_some();
        let names = checkpoint.tensors().keys();
        names
            .filter(|name| !is_parameter(name.as_str()))
            .map(|name| {
                (
                    name.clone(),
                    self.inner.allowance.aliases.get(name).cloned(),
                )
            })
            .collect()
    }

    /// The parameter, not one of `own`, whose values a computation misses that fails for want of values: `fails` does it again, and
    /// tells whether it fails in the same way. To find out, values are put in place that mean nothing.
    pub(crate) fn missed(&self, own: &[usize], fails: impl Fn() -> bool) -> Option<&Param> {
        let absent = self.iter().enumerate();
        let absent = absent.filter(|(index, param)| !own.contains(index) && !param.is_present());
        let absent: Vec<&Param> = absent.map(|(_, param)| param).collect();
        let missed = absent.iter().find(|param| {
            let zeros = Tensor::zeros(param.local_shape(), param.dtype(), param.device());
            zeros.and_then(|zeros| param.refill(&zeros)).is_ok() && !fails()
        });
        for param in &absent {
            if param.release().is_err() {
                tracing::warn!("parameter {} could not be released again", param.name);
            }
        }
        missed.copied()
    }
}
