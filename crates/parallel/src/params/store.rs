//! Where parameters come from while a model is being built.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_comm::Mesh;
use candle_core::{DType, Device, Result, Shape, Tensor, Var, bail};
use candle_nn::Init;

use super::allowance::Allowance;
use super::builder::ParamBuilder;
use super::model_spec::ModelSpec;
use super::packed_weights::{KeptWeight, PackWeights};
use super::param::{Asker, Param, asked_twice};
use super::param_spec::ParamSpec;
use super::parameters::{Parameters, Requested, StoreParts};
use super::released::empty_var;
use super::source::{BaseSource, LoraSource, Source, Wanted};
use super::tiled_weight::TiledWeight;
use super::weight_format::{Packing, WeightFormat, hold};
use crate::agreement::Facts;
use crate::data_parallel::{DataParallel, ZeroStage};
use crate::files::Checkpoint;
use crate::lora::{Adapter, LoraConfig};
use crate::offload::Offload;
use crate::pipeline_layout::PipelineLayout;
use crate::placement::Placement;

/// The parameters of a model under construction, keyed by Hugging Face name.
///
/// Layers ask it for what they need through a [`ParamBuilder`]; it reads or initialises just the part of this rank.
/// [`crate::ModelPart::build`] then seals it into [`Parameters`].
#[derive(Clone)]
pub struct ParamStore {
    state: Arc<Mutex<StoreState>>,
    common: StoreParts,
}

#[derive(Default)]
struct StoreState {
    params: BTreeMap<String, Param>,
    allowance: Allowance,
    is_frozen: Option<NamePredicate>,
    replicas: DataParallel,
    offload: Offload,
    /// Of frozen weights that layers use tile by tile.
    frozen_format: Option<WeightFormat>,
    pack_weights: PackWeights,
    /// Weights that stay packed, by name.
    kept_packed: BTreeMap<String, Arc<KeptWeight>>,
    /// Linear layers that can have an adapter, whether they get one or not.
    linears: BTreeSet<String>,
    /// See [`ParamStore::building`].
    is_building: bool,
    /// See [`ParamStore::without_values`].
    without_values: bool,
}

impl StoreState {
    /// Whether values are not in memory while blocks are built.
    fn defers_values(&self) -> bool {
        self.replicas.zero == ZeroStage::Three || self.offload.params
    }
}

/// See [`ParamStore::building`].
pub(crate) struct Building(ParamStore);

impl Drop for Building {
    fn drop(&mut self) {
        self.0.lock().is_building = false;
    }
}

type NamePredicate = Box<dyn Fn(&str) -> bool + Send + Sync>;

/// One request of a layer.
pub(crate) struct ParamRequest<'a> {
    pub name: String,
    pub shape: Shape,
    pub placement: Placement,
    pub init: Init,
    pub dtype: DType,
    pub device: &'a Device,
    pub asker: Asker,
    /// Whether others ask for it, too: see [`ParamBuilder::tied`].
    pub is_tied: bool,
    /// Whether the layer can use its rows tile by tile.
    pub by_tiles: bool,
    /// Whether the layer multiplies with it.
    pub is_multiplied: bool,
    /// Whether it is of a low-rank adapter.
    pub is_adapter: bool,
    /// Whether the block that asks is neither the first nor the last.
    pub is_inner: bool,
    /// Whether a micro-batch may leave it without a gradient: see [`ParamBuilder::used_at_times`].
    pub is_used_at_times: bool,
}

impl ParamStore {
    /// Parameters drawn at random; the same values for a seed and a name on every layout.
    pub fn init(seed: u64) -> Self {
        Self::new(BaseSource::Init { seed })
    }

    /// Parameters of the Hugging Face checkpoint in folder `dir`. The files are mapped and checked, and read when asked for.
    ///
    /// # Errors
    /// A folder without weights, and a file that is missing, truncated, not safetensors or at odds with the index.
    pub fn from_pretrained(dir: impl AsRef<Path>) -> Result<Self> {
        Checkpoint::open(dir.as_ref()).map(Self::from_checkpoint)
    }

    /// Parameters of a checkpoint that is open already.
    pub fn from_checkpoint(checkpoint: Checkpoint) -> Self {
        Self::new(BaseSource::Pretrained(checkpoint))
    }

    /// The checkpoint that the parameters come from, if there is one.
    pub fn checkpoint(&self) -> Option<&Checkpoint> {
        self.common.source.checkpoint()
    }

    fn new(base: BaseSource) -> Self {
        Self {
            state: Arc::default(),
            common: StoreParts {
                source: Arc::new(Source { base, lora: None }),
                pending: Arc::default(),
                set_weights: Arc::default(),
                sharded: Arc::default(),
                packed: Arc::default(),
            },
        }
    }

    /// A builder for this store's parameters, at the root of the names.
    pub fn builder(&self, dtype: DType, device: &Device) -> ParamBuilder {
        ParamBuilder::new(self.clone(), dtype, device.clone())
    }

    /// Freezes the parameters whose name satisfies `is_frozen`; call it before the model is built.
    ///
    /// A frozen parameter keeps its values: no gradient is computed for it, and it has no place in the gradients' buckets, no
    /// master weights and no moments. Every rank says the same of every name of the model. That no parameter's name
    /// satisfies `is_frozen` is an error when the model is built.
    pub fn freeze(self, is_frozen: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        self.lock().is_frozen = Some(Box::new(is_frozen));
        self
    }

    /// New low-rank adapters for linear layers (arXiv:2106.09685); call it before the model is built.
    ///
    /// [`crate::column_parallel_linear`] and [`crate::row_parallel_linear`] ask for them, other layers by [`crate::LowRank`]. All
    /// other parameters are frozen. What is saved is the adapter, in the folder that `peft` loads.
    ///
    /// ```
    /// use candle_comm::ProcessGroup;
    /// use candle_core::{DType, Device, Result};
    /// use candle_parallel::*;
    ///
    /// fn main() -> Result<()> {
    ///     let targets = LoraTargets::Names(vec!["up".to_string()]);
    ///     let lora = LoraConfig { rank: 8, targets, ..LoraConfig::default() };
    ///     let vb = ParamStore::init(0).with_lora(lora)?.builder(DType::F32, &Device::Cpu);
    ///     let tp = ProcessGroup::single(Device::Cpu);
    ///     let up = column_parallel_linear(16, 32, false, &tp, vb.pp("up"))?;
    ///     let down = row_parallel_linear(32, 16, false, &tp, vb.pp("down"))?;
    ///     // The weight, A and B, of which these two are trained; and a weight alone.
    ///     let trained: Vec<bool> = up.weights().iter().map(|weight| weight.track_op()).collect();
    ///     assert_eq!(trained, [false, true, true]);
    ///     assert!(down.weights().iter().all(|weight| !weight.track_op()));
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    /// Numbers out of their range, and a store that has a builder or adapters already.
    pub fn with_lora(self, lora: LoraConfig) -> Result<Self> {
        lora.validate()?;
        self.with_lora_source(LoraSource::Init(lora))
    }

    /// [`Self::with_lora`], with adapters that were trained already.
    ///
    /// # Errors
    /// As [`Self::with_lora`]. What does not fit the model is an error when that is built.
    pub fn with_adapter(self, adapter: Adapter) -> Result<Self> {
        self.with_lora_source(LoraSource::Trained(adapter))
    }

    fn with_lora_source(mut self, lora: LoraSource) -> Result<Self> {
        match Arc::get_mut(&mut self.common.source) {
            Some(source) if source.lora.is_none() => source.lora = Some(lora),
            _ => bail!(
                "low-rank adapters are asked for twice, or of a parameter store that is in use\nhint: call with_lora or with_adapter \
                 once, before builder"
            ),
        }
        Ok(self)
    }

    /// The adapters of the model, if the linear layer `module` gets one.
    pub(crate) fn lora_of(&self, module: &str, is_head: bool) -> Option<LoraConfig> {
        let lora = self.common.source.lora()?;
        self.lock().linears.insert(module.to_string());
        let is_target = lora.targets.contains(module, is_head);
        is_target.then(|| lora.clone())
    }

    /// How data-parallel replicas work together; call it before the model is built. Without it: ZeRO-1, overlapping.
    ///
    /// With [`ZeroStage::Three`] the values of parameters are not there while blocks are built, nor outside of their passes:
    /// see [`Parameters::values`]. One model only can be built from the store then.
    pub fn with_data_parallel(self, replicas: impl Into<DataParallel>) -> Self {
        self.lock().replicas = replicas.into();
        self
    }

    /// What a rank keeps in the host's memory or in files; call it before the model is built. Without it: nothing. With [`Offload::params`] the values
    /// of parameters are there as with [`ZeroStage::Three`].
    pub fn with_offload(self, offload: Offload) -> Self {
        self.lock().offload = offload;
        self
    }

    /// Holds the frozen weights of linear layers, embedding and head in another form than that of the values that the model computes
    /// with; call it before the model is built. Without it: in that one.
    pub fn with_frozen_format(self, format: WeightFormat) -> Self {
        self.lock().frozen_format = Some(format);
        self
    }

    /// Which weights stay packed for products on the CPU; call it before the model is built. Without it: none.
    pub fn with_packed_weights(self, pack_weights: PackWeights) -> Self {
        self.lock().pack_weights = pack_weights;
        self
    }

    /// Leaves the values of parameters where they are; call it before the model is built. That is checked as ever, for names, shapes, types,
    /// adapters and what is frozen, and [`Parameters`] tell what it takes, but nothing can be computed: to see before a run what would
    /// be wrong with it.
    pub fn without_values(self) -> Self {
        self.lock().without_values = true;
        self
    }

    /// Accepts that a checkpoint holds parameter `name` a second time, as `alias`, or under that name alone: tied
    /// weights.
    pub fn allow_alias(&self, alias: &str, name: &str) {
        if let Some(checkpoint) = self.common.source.checkpoint() {
            checkpoint.allow_alias(alias, name);
        }
        let mut state = self.lock();
        let aliases = &mut state.allowance.aliases;
        aliases.insert(alias.to_string(), name.to_string());
    }

    /// Accepts that a checkpoint holds constants, which the model does not read, whose names end in `suffix`.
    pub fn allow_unused(&self, suffix: &str) {
        self.lock().allowance.suffixes.push(suffix.to_string());
    }

    /// The names of the parameters that layers have asked for.
    pub(crate) fn names(&self) -> Vec<String> {
        self.lock().params.keys().cloned().collect()
    }

    /// An error if the checkpoint has tensors that are not among these parameters and that are not allowed.
    pub(crate) fn check_all_used(&self, used: &BTreeSet<String>) -> Result<()> {
        let used = used.iter().map(String::as_str).collect();
        match self.common.source.checkpoint() {
            Some(checkpoint) => self.lock().allowance.check_all_used(checkpoint, &used),
            None => Ok(()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, StoreState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the source can give a parameter of this name.
    pub(crate) fn contains(&self, name: &str) -> bool {
        let checkpoint = self.common.source.checkpoint();
        checkpoint.is_none_or(|checkpoint| checkpoint.entry(name).is_ok())
    }

    /// The global shape a parameter has in the checkpoint, if there is one.
    pub(crate) fn stored_shape(&self, name: &str) -> Result<Shape> {
        let Some(checkpoint) = self.common.source.checkpoint() else {
            bail!(
                "parameter {name}: its shape must be given, as there is no checkpoint to take it from"
            )
        };
        Ok(Shape::from(checkpoint.entry(name)?.shape.as_slice()))
    }

    /// [`Self::get`] for a layer that can use the rows tile by tile. A weight that a layer multiplies with may stay packed.
    pub(crate) fn get_tiled(&self, request: ParamRequest<'_>) -> Result<TiledWeight> {
        let name = request.name.clone();
        let may_stay_packed = request.is_multiplied && request.device.is_cpu();
        let whole = self.get(request)?;
        let mut state = self.lock();
        let StoreState {
            params,
            kept_packed,
            pack_weights,
            ..
        } = &mut *state;
        let param = params.get(&name);
        let packing = param.and_then(|param| param.packing.clone());
        let is_as_it_is = may_stay_packed && packing.is_none();
        let weight = TiledWeight::new(whole, name.clone(), packing, &self.common.sharded);
        let stays = |param: &&Param| is_as_it_is && pack_weights.includes(param.trainable);
        let (Some(param), Ok(dims)) = (param.filter(stays), weight.dims2()) else {
            return Ok(weight);
        };
        let kept = || KeptWeight::new(&self.common.packed, dims, param.dtype(), param.trainable);
        let kept = kept_packed.entry(name).or_insert_with(|| Arc::new(kept()));
        Ok(weight.kept_packed(kept.clone()))
    }

    pub(crate) fn get(&self, request: ParamRequest<'_>) -> Result<Tensor> {
        let mut state = self.lock();
        let is_building = state.is_building;
        if let Some(param) = state.params.get_mut(&request.name) {
            if param.global_shape != request.shape || param.placement != request.placement {
                bail!(
                    "parameter {} is asked for twice: as {:?} ({:?}) and as {:?} ({:?})",
                    request.name,
                    param.global_shape,
                    param.placement,
                    request.shape,
                    request.placement
                );
            }
            if param.packing.is_none() && param.dtype() != request.dtype {
                bail!(
                    "parameter {} is asked for twice: as {} and as {}\nhint: ask for it in one type, and convert it where it is used",
                    request.name,
                    param.dtype().as_str(),
                    request.dtype.as_str()
                );
            }
            match (param.asked_by, request.is_tied) {
                (_, true) => {}
                (None, false) => param.asked_by = Some(request.asker),
                // A program that makes layers without a model knows what it does.
                (Some(Asker::Outside), false)
                    if request.asker == Asker::Outside && !is_building => {}
                (Some(first), false) => bail!("{}", asked_twice(&param.name, first, request.asker)),
            }
            let (first, second) = (format!("{:?}", param.init), format!("{:?}", request.init));
            if first != second && self.common.source.is_drawn(&param.wanted()) {
                bail!(
                    "parameter {} is asked for twice, with other initial values: {first} and {second}\nhint: ask for it with the \
                     same Init everywhere",
                    param.name
                );
            }
            if param.packing.is_some() && !request.by_tiles {
                bail!(
                    "parameter {} is held in fewer bits for one layer, and another one asks for it whole\nhint: ask for it by \
                     ParamBuilder::get_tiled in both, or leave with_frozen_format out",
                    request.name
                );
            }
            param.is_tiled &= request.by_tiles;
            if request.is_multiplied {
                param.multiplied_by.push(request.asker.block());
            }
            param.is_used_at_times |= request.is_used_at_times;
            let block = request.asker.block();
            if !param.blocks.contains(&block) {
                param.blocks.push(block);
            }
            return Ok(param.tensor());
        }
        let is_frozen = state.is_frozen.as_ref();
        let is_frozen = is_frozen.is_some_and(|is_frozen| is_frozen(&request.name));
        // Beside adapters nothing else is trained.
        let trainable = !is_frozen && (request.is_adapter || self.common.source.lora.is_none());
        let is_deferred = state.defers_values() || state.without_values;
        let is_tiled = request.by_tiles && state.replicas.tile_linears > 1;
        let is_packed = request.by_tiles && !trainable;
        let format = state.frozen_format.filter(|_| is_packed);
        let mut param = self.load(request, trainable, is_deferred, format)?;
        param.is_tiled = is_tiled;
        let tensor = param.tensor();
        state.params.insert(param.name.clone(), param);
        Ok(tensor)
    }

    /// A parameter, held in `format` if there is one; its values are left out if they are cut into slices later.
    fn load(
        &self,
        request: ParamRequest<'_>,
        trainable: bool,
        is_deferred: bool,
        format: Option<WeightFormat>,
    ) -> Result<Param> {
        let (name, shape, dtype) = (&request.name, &request.shape, request.dtype);
        let mut local_dims = shape.dims().to_vec();
        let shard = request.placement.shard();
        if let Some(shard) = shard {
            let fits = local_dims.get(shard.dim()) == Some(&shard.global())
                && shard.held().are_valid(shard.global());
            if !fits {
                bail!("parameter {name}: {shard:?} does not fit its shape {shape:?}");
            }
            local_dims[shard.dim()] = shard.len();
        }
        let packing = match (format, local_dims.as_slice()) {
            (Some(format), &[rows, columns]) => Packing::new(
                format,
                request.is_inner,
                name,
                [rows, columns],
                shard,
                dtype,
            )?,
            _ => None,
        };
        let (held_dtype, held_dims) = match &packing {
            None => (dtype, local_dims.clone()),
            Some(packing) => (packing.held_dtype(), packing.held_dims().to_vec()),
        };
        let num_bytes = held_dims.iter().product::<usize>() * held_dtype.size_in_bytes();
        let wanted = Wanted {
            name,
            shape,
            shard,
            init: request.init,
            is_adapter: request.is_adapter,
        };
        let stored_dtype = self.common.source.stored_dtype(&wanted, dtype)?;
        let var = || match is_deferred {
            true => empty_var(held_dims, held_dtype, request.device),
            false => {
                let values = self.common.source.values(&wanted)?;
                let held = hold(values, packing.as_ref(), &local_dims, dtype)?;
                match num_bytes {
                    0 => empty_var(held_dims, held_dtype, request.device),
                    _ => Var::from_tensor(&held.to_device(request.device)?),
                }
            }
        };
        let var = var().map_err(|err| {
            err.context(format!(
                "putting parameter {name} of {num_bytes} bytes on {:?}",
                request.device.location()
            ))
        })?;
        let block = request.asker.block();
        let param = Param {
            var,
            name: request.name,
            global_shape: request.shape,
            placement: request.placement,
            init: request.init,
            blocks: vec![block],
            multiplied_by: request.is_multiplied.then_some(block).into_iter().collect(),
            asked_by: (!request.is_tied).then_some(request.asker),
            trainable,
            is_used_at_times: request.is_used_at_times,
            is_tiled: false,
            packing,
            is_adapter: request.is_adapter,
            stored_dtype,
            pending: self.common.pending.clone(),
            of_products: self.common.packed.clone(),
        };
        if is_deferred {
            param.release()?;
        }
        Ok(param)
    }

    /// Whether values are not in memory while blocks are built.
    pub(crate) fn defers_values(&self) -> bool {
        self.lock().defers_values()
    }

    /// Says, until it is dropped, that blocks of a model are being built: what asks then with the builder of no block does so by mistake, if
    /// it asks twice.
    pub(crate) fn building(&self) -> Building {
        self.lock().is_building = true;
        Building(self.clone())
    }

    /// What has been asked for on rank `pp_rank` of a pipeline, in name order.
    pub(crate) fn specs(&self, pp_rank: usize, layout: &PipelineLayout) -> Vec<ParamSpec> {
        let state = self.lock();
        let spec = |param: &Param| {
            let is_drawn = self.common.source.is_drawn(&param.wanted());
            ParamSpec::of(param, pp_rank, is_drawn, layout)
        };
        state.params.values().map(spec).collect()
    }

    /// The multiple of values at which a parameter begins in flat buffers.
    pub(crate) fn slot_alignment(&self) -> usize {
        self.lock().replicas.slot_alignment()
    }

    /// An error if what the store was told does not fit a model that asked for this, on so many replicas.
    pub(crate) fn check(&self, model: &ModelSpec, num_replicas: usize) -> Result<()> {
        let state = self.lock();
        state.replicas.validate(num_replicas)?;
        model.check_adapters(self.common.source.lora.as_ref(), &state.linears)
    }

    /// Ends construction: finds out what the whole model asks for and which ties it has between stages, and checks that it used every
    /// tensor of the checkpoint. `facts` is what all ranks must say alike of the model. Every rank of the mesh must call it.
    pub(crate) fn seal(
        &self,
        mesh: &Mesh,
        facts: Facts,
        layout: &PipelineLayout,
    ) -> Result<Parameters> {
        let specs = self.specs(mesh.pp.rank(), layout);
        let mut state = self.lock();
        let params: Vec<Param> = state.params.values().cloned().collect();
        // Another model that is built from this store has these parameters, too.
        let of_blocks = state.params.values_mut();
        for param in of_blocks.filter(|param| param.is_of_blocks()) {
            param.asked_by = None;
        }
        let requested = Requested {
            params,
            specs,
            common: self.common.clone(),
            allowance: state.allowance.clone(),
            replicas: state.replicas,
            offload: state.offload.clone(),
            without_values: state.without_values,
        };
        let params = Parameters::new(requested, mesh, layout, facts)?;
        let lora = self.common.source.lora.as_ref();
        params.model().check_adapters(lora, &state.linears)?;
        if let Some(is_frozen) = &state.is_frozen {
            check_frozen(&params, is_frozen, lora.is_some())?;
        }
        Ok(params)
    }
}

/// An error if a model has no parameter that is to be frozen, or one of which another rank says otherwise.
fn check_frozen(params: &Parameters, is_frozen: &NamePredicate, has_adapters: bool) -> Result<()> {
    let mut is_any = false;
    for entry in params.catalog() {
        let is_named = is_frozen(&entry.name);
        is_any |= is_named;
        let trainable = !is_named && (entry.is_adapter || !has_adapters);
        if trainable != entry.trainable {
            bail!(
                "parameter {} is frozen by what one rank says, and trained by what another one does\nhint: every rank gives ParamStore::freeze \
                 the same names, also of blocks that it does not hold",
                entry.name
            );
        }
    }
    if is_any {
        return Ok(());
    }
    let mut names = params.catalog().iter().map(|entry| entry.name.as_str());
    bail!(
        "ParamStore::freeze matches none of the {} parameters of the model, so all of them would be trained\nhint: names are those of the \
         model's files, such as {}; leave freeze out to train all",
        names.len(),
        names.next().unwrap_or_default()
    )
}
