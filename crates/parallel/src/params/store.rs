//! Where parameters come from while a model is being built.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use candle_comm::Mesh;
use candle_core::{DType, Device, Result, Shape, Tensor, Var, bail};
use candle_nn::Init;
use candle_ops::round_into;
use rayon::prelude::*;

use super::builder::ParamBuilder;
use super::data_parallel::{DataParallel, ZeroStage};
use super::init::init_values;
use super::param::Param;
use super::parameters::Parameters;
use super::pending_weights::PendingWeights;
use super::placement::{Placement, Shard};
use super::sharded_weights::ShardedWeights;
use super::tiled_weight::TiledWeight;
use crate::checkpoint::Checkpoint;

/// The parameters of a model under construction, keyed by Hugging Face name.
///
/// Layers ask it for what they need through a [`ParamBuilder`]; it reads or initialises just the part of this rank.
/// [`crate::Stage::build`] then seals it into [`Parameters`].
#[derive(Clone)]
pub struct ParamStore {
    source: Arc<Source>,
    state: Arc<Mutex<State>>,
    pending: Arc<PendingWeights>,
    sharded: Arc<OnceLock<ShardedWeights>>,
}

pub(crate) enum Source {
    Init { seed: u64 },
    Pretrained(Checkpoint),
}

impl Source {
    /// The rank's part of a parameter in f32, row-major. Values of a checkpoint that are NaN or infinite are an error.
    pub fn values(
        &self,
        name: &str,
        shape: &Shape,
        shard: Option<&Shard>,
        init: Init,
    ) -> Result<Vec<f32>> {
        match self {
            Self::Init { seed } => init_values(*seed, name, shape, shard, init),
            Self::Pretrained(checkpoint) => {
                let values = checkpoint.read(name, shape.dims(), shard)?;
                if !values.par_iter().all(|value| value.is_finite()) {
                    bail!(
                        "tensor {name} in {} has values that are NaN or infinite\nhint: the file was damaged, or the training that \
                         wrote it had diverged",
                        checkpoint.dir().display()
                    );
                }
                Ok(values)
            }
        }
    }
}

#[derive(Default)]
struct State {
    params: BTreeMap<String, Param>,
    allowance: Allowance,
    is_frozen: Option<NamePredicate>,
    replicas: DataParallel,
}

type NamePredicate = Box<dyn Fn(&str) -> bool + Send + Sync>;

/// Tensors of a checkpoint that the model does not ask for and that are no mistake.
#[derive(Clone, Default, Debug)]
pub(crate) struct Allowance {
    /// Second names of a parameter: (second name, name).
    pub aliases: BTreeMap<String, String>,
    /// Endings of the names of constants that some files carry along.
    pub suffixes: Vec<String>,
}

/// One request of a layer.
pub(crate) struct ParamRequest<'a> {
    pub name: String,
    pub shape: Shape,
    pub placement: Placement,
    pub init: Init,
    pub dtype: DType,
    pub device: &'a Device,
    pub block: usize,
    /// Whether the layer can use its rows tile by tile.
    pub by_tiles: bool,
}

/// f32 values in another type; on all threads if that has 16 bits, as billions of them are.
pub(crate) fn in_dtype(values: Tensor, dtype: DType) -> Result<Tensor> {
    let is_narrow = matches!(dtype, DType::BF16 | DType::F16);
    if !is_narrow || values.elem_count() == 0 {
        return values.to_dtype(dtype);
    }
    let rounded = Tensor::zeros(values.shape(), dtype, values.device())?;
    round_into(&rounded, &values)?;
    Ok(rounded)
}

impl ParamStore {
    /// Parameters drawn at random; the same values for a seed and a name on every layout.
    pub fn init(seed: u64) -> Self {
        Self::new(Source::Init { seed })
    }

    /// Parameters of the Hugging Face checkpoint in folder `dir`. The files are mapped and checked, and read when asked for.
    pub fn from_pretrained(dir: impl AsRef<Path>) -> Result<Self> {
        Ok(Self::new(Source::Pretrained(Checkpoint::open(
            dir.as_ref(),
        )?)))
    }

    /// The checkpoint that the parameters come from, if there is one.
    pub fn checkpoint(&self) -> Option<&Checkpoint> {
        match &*self.source {
            Source::Init { .. } => None,
            Source::Pretrained(checkpoint) => Some(checkpoint),
        }
    }

    fn new(source: Source) -> Self {
        Self {
            source: Arc::new(source),
            state: Arc::default(),
            pending: Arc::default(),
            sharded: Arc::default(),
        }
    }

    /// A builder for this store's parameters, at the root of the names.
    pub fn builder(&self, dtype: DType, device: &Device) -> ParamBuilder {
        ParamBuilder::new(self.clone(), dtype, device.clone())
    }

    /// Freezes the parameters whose name satisfies `is_frozen`; call it before the model is built.
    ///
    /// A frozen parameter keeps its values: no gradient is computed for it, and it has no place in the gradients' buckets, no
    /// master weights and no moments.
    pub fn freeze(self, is_frozen: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        self.lock().is_frozen = Some(Box::new(is_frozen));
        self
    }

    /// How data-parallel replicas work together; call it before the model is built. Without it: ZeRO-1, overlapping.
    ///
    /// With [`ZeroStage::Three`] the values of parameters are not there while blocks are built, nor outside of their passes:
    /// see [`Parameters::values`]. One model only can be built from the store then.
    pub fn with_data_parallel(self, replicas: impl Into<DataParallel>) -> Self {
        self.lock().replicas = replicas.into();
        self
    }

    /// Accepts that a checkpoint holds parameter `name` a second time, as `alias`: tied weights, written twice.
    pub fn allow_alias(&self, alias: &str, name: &str) {
        let mut state = self.lock();
        let aliases = &mut state.allowance.aliases;
        aliases.insert(alias.to_string(), name.to_string());
    }

    /// Accepts that a checkpoint holds constants, which the model does not read, whose names end in `suffix`.
    pub fn allow_unused(&self, suffix: &str) {
        self.lock().allowance.suffixes.push(suffix.to_string());
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the source can give a parameter of this name.
    pub(crate) fn contains(&self, name: &str) -> bool {
        match &*self.source {
            Source::Init { .. } => true,
            Source::Pretrained(checkpoint) => checkpoint.tensors().contains_key(name),
        }
    }

    /// The global shape a parameter has in the checkpoint, if there is one.
    pub(crate) fn stored_shape(&self, name: &str) -> Result<Shape> {
        match &*self.source {
            Source::Init { .. } => {
                bail!(
                    "parameter {name}: its shape must be given, as there is no checkpoint to take it from"
                )
            }
            Source::Pretrained(checkpoint) => {
                Ok(Shape::from(checkpoint.entry(name)?.shape.as_slice()))
            }
        }
    }

    /// [`Self::get`] for a layer that can use the rows tile by tile.
    pub(crate) fn get_tiled(&self, request: ParamRequest<'_>) -> Result<TiledWeight> {
        let name = request.name.clone();
        let whole = self.get(request)?;
        Ok(TiledWeight::new(whole, name, &self.sharded))
    }

    pub(crate) fn get(&self, request: ParamRequest<'_>) -> Result<Tensor> {
        let mut state = self.lock();
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
            param.is_tiled &= request.by_tiles;
            if !param.blocks.contains(&request.block) {
                param.blocks.push(request.block);
            }
            return Ok(param.tensor());
        }
        let trainable = !state
            .is_frozen
            .as_ref()
            .is_some_and(|is_frozen| is_frozen(&request.name));
        let is_deferred = state.replicas.zero == ZeroStage::Three;
        let is_tiled = request.by_tiles && state.replicas.tile_linears > 1;
        let mut param = self.load(request, trainable, is_deferred)?;
        param.is_tiled = is_tiled;
        let tensor = param.tensor();
        state.params.insert(param.name.clone(), param);
        Ok(tensor)
    }

    /// A parameter; its values are left out if they are cut into slices later.
    fn load(&self, request: ParamRequest<'_>, trainable: bool, is_deferred: bool) -> Result<Param> {
        let ParamRequest {
            name,
            shape,
            placement,
            init,
            dtype,
            device,
            block,
            by_tiles: _,
        } = request;
        let mut local_dims = shape.dims().to_vec();
        if let Some(shard) = placement.shard() {
            let fits = local_dims.get(shard.dim) == Some(&shard.global)
                && shard.range.start <= shard.range.end
                && shard.range.end <= shard.global;
            if !fits {
                bail!("parameter {name}: {shard:?} does not fit its shape {shape:?}");
            }
            local_dims[shard.dim] = shard.len();
        }
        let shard = placement.shard();
        let num_bytes = local_dims.iter().product::<usize>() * dtype.size_in_bytes();
        let stored_dtype = match &*self.source {
            Source::Init { .. } => dtype,
            Source::Pretrained(checkpoint) => checkpoint.dtype_of(&name, shape.dims())?,
        };
        let var = || match is_deferred {
            true => Var::zeros(local_dims.as_slice(), dtype, device),
            false => {
                let values = self.source.values(&name, &shape, shard, init)?;
                let values = Tensor::from_vec(values, local_dims.as_slice(), &Device::Cpu)?;
                Var::from_tensor(&in_dtype(values, dtype)?.to_device(device)?)
            }
        };
        let var = var().map_err(|err| {
            err.context(format!(
                "putting parameter {name} of {num_bytes} bytes on {:?}",
                device.location()
            ))
        })?;
        let param = Param {
            var,
            name,
            global_shape: shape,
            placement,
            init,
            blocks: vec![block],
            trainable,
            is_tiled: false,
            stored_dtype,
            pending: self.pending.clone(),
        };
        if is_deferred {
            param.release()?;
        }
        Ok(param)
    }

    /// Ends construction: exchanges what each rank holds, finds ties between stages and checks that the model used every
    /// tensor of the checkpoint. Every rank of the mesh must call it.
    pub(crate) fn seal(&self, mesh: &Mesh) -> Result<Parameters> {
        let state = self.lock();
        Parameters::new(
            state.params.values().cloned().collect(),
            (self.source.clone(), state.allowance.clone()),
            (self.pending.clone(), self.sharded.clone()),
            (mesh, state.replicas),
        )
    }
}
