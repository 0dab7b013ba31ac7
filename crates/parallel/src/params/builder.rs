//! How layers ask for their parameters: a store, a prefix of names and the block that asks.

use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use candle_nn::Init;
use candle_nn::var_builder::SimpleBackend;

use super::param::Asker;
use super::store::{ParamRequest, ParamStore};
use super::tiled_weight::TiledWeight;
use crate::lora::LoraConfig;
use crate::pass::Region;
use crate::placement::{Gradient, Placement};

/// Initial distribution of weight matrices when there is no checkpoint: N(0, 0.02²), as in Llama.
pub const WEIGHT_INIT: Init = Init::Randn {
    mean: 0.0,
    stdev: 0.02,
};

/// Hands out parameters under a prefix, as candle's `VarBuilder` does, for layers that may hold only a part of them.
#[derive(Clone)]
pub struct ParamBuilder {
    store: ParamStore,
    prefix: String,
    dtype: DType,
    device: Device,
    asker: Asker,
    /// Whether that is the last block of the model.
    is_head: bool,
    is_tied: bool,
    is_used_at_times: bool,
    /// Of what is asked for without a placement.
    gradient: Gradient,
}

impl ParamBuilder {
    pub(crate) fn new(store: ParamStore, dtype: DType, device: Device) -> Self {
        Self {
            store,
            prefix: String::new(),
            dtype,
            device,
            asker: Asker::Outside,
            is_head: false,
            is_tied: false,
            is_used_at_times: false,
            gradient: Gradient::Complete,
        }
    }

    /// The builder one name further: `vb.pp("model").pp("norm")` asks for `model.norm.*`.
    pub fn pp(&self, name: impl ToString) -> Self {
        Self {
            prefix: self.path(&name.to_string()),
            ..self.clone()
        }
    }

    /// The builder of block `index` of a chain of `num_blocks`; its parameters' gradients are reduced together.
    pub(crate) fn block(&self, index: usize, num_blocks: usize) -> Self {
        Self {
            asker: Asker::Block(index),
            is_head: index + 1 == num_blocks,
            ..self.clone()
        }
    }

    /// The builder for a parameter that something else of the model asks for, too: tied weights, such as the embedding's and the
    /// head's. Without it a name that is asked for twice is an error, as where a block forgets to put its index before its names. Of
    /// all that share a parameter one may ask for it without this.
    ///
    /// Each block that uses a parameter asks for it. A block that uses a clone of another block's tensor trains it rightly where
    /// both are on one rank, but where replicas divide the weights (ZeRO-3) the values are there for blocks that asked only.
    pub fn tied(&self) -> Self {
        Self {
            is_tied: true,
            ..self.clone()
        }
    }

    /// The builder for parameters that a micro-batch may leave without a gradient, as that of an expert to which no token goes: it then counts
    /// as zero. Of others that is an error, as it is mostly a mistake.
    pub fn used_at_times(&self) -> Self {
        Self {
            is_used_at_times: true,
            ..self.clone()
        }
    }

    /// The builder for whole parameters that are used on what a rank has outside of `region`, as norms between two regions are: with sequence
    /// parallelism each rank has the gradient of its rows.
    pub fn outside(&self, region: &Region) -> Self {
        Self {
            gradient: region.outside(),
            ..self.clone()
        }
    }

    fn path(&self, name: &str) -> String {
        match self.prefix.as_str() {
            "" => name.to_string(),
            prefix => format!("{prefix}.{name}"),
        }
    }

    /// A whole parameter of the given shape, which every tensor-parallel rank uses on the same values, or [outside](Self::outside) of a region;
    /// `init` is its distribution if there is no checkpoint. One that ranks use on different values, inside a tensor-parallel region, needs
    /// [`Self::get_placed`] with [`Gradient::Partial`]: with this method it is an error in the first step.
    ///
    /// # Errors
    /// As for [`Self::get_placed`].
    pub fn get(&self, shape: impl Into<Shape>, name: &str, init: Init) -> Result<Tensor> {
        self.get_placed(shape, name, Placement::Replicated(self.gradient), init)
    }

    /// What this rank holds, according to `placement`, of a parameter whose global shape is `shape`.
    ///
    /// # Errors
    /// A name that is asked for twice without [`Self::tied`], one that the checkpoint lacks or has in another shape or type, a part beyond the
    /// shape, and a device without memory for it.
    pub fn get_placed(
        &self,
        shape: impl Into<Shape>,
        name: &str,
        placement: impl Into<Placement>,
        init: Init,
    ) -> Result<Tensor> {
        let request = self.request(shape.into(), name, placement.into(), init);
        self.store.get(request)
    }

    /// [`Self::get_placed`], for a layer that can use the rows (dim 0) of what it holds tile by tile.
    ///
    /// # Errors
    /// As for [`Self::get_placed`].
    pub fn get_tiled(
        &self,
        shape: impl Into<Shape>,
        name: &str,
        placement: impl Into<Placement>,
        init: Init,
    ) -> Result<TiledWeight> {
        let request = self.request(shape.into(), name, placement.into(), init);
        self.store.get_tiled(ParamRequest {
            by_tiles: true,
            ..request
        })
    }

    /// [`Self::get_tiled`], for a linear layer, which multiplies with it: it may [stay packed](crate::PackWeights).
    ///
    /// # Errors
    /// As for [`Self::get_placed`].
    pub fn get_linear(
        &self,
        shape: impl Into<Shape>,
        name: &str,
        placement: impl Into<Placement>,
        init: Init,
    ) -> Result<TiledWeight> {
        let request = self.request(shape.into(), name, placement.into(), init);
        self.store.get_tiled(ParamRequest {
            by_tiles: true,
            is_multiplied: true,
            ..request
        })
    }

    /// The low-rank adapters of the model, if the linear layer at this prefix has one.
    pub(crate) fn lora(&self) -> Option<LoraConfig> {
        self.store.lora_of(&self.prefix, self.is_head)
    }

    /// [`Self::get_placed`], for a parameter of a low-rank adapter.
    pub(crate) fn get_adapter(
        &self,
        shape: impl Into<Shape>,
        name: &str,
        placement: Placement,
        init: Init,
    ) -> Result<Tensor> {
        let request = self.request(shape.into(), name, placement, init);
        self.store.get(ParamRequest {
            is_adapter: true,
            ..request
        })
    }

    /// An error for what forward passes would change, and no optimizer: candle's layers copy it into variables of their own, which
    /// no rank compares or averages, and which are in no file.
    fn check_is_no_buffer(&self, name: &str) -> Result<()> {
        let last = name.rsplit('.').next().unwrap_or_default();
        if !matches!(last, "running_mean" | "running_var" | "num_batches_tracked") {
            return Ok(());
        }
        bail!(
            "{name} is a running statistic of a batch normalization, which forward passes change: ranks would come to have \
             different ones, and what is saved would be the initial ones\nhint: use a normalization without running statistics (layer, \
             group or RMS norm), or fold trained statistics into the layer before"
        )
    }

    fn request(
        &self,
        shape: Shape,
        name: &str,
        placement: Placement,
        init: Init,
    ) -> ParamRequest<'_> {
        ParamRequest {
            name: self.path(name),
            shape,
            placement,
            init,
            dtype: self.dtype,
            device: &self.device,
            asker: self.asker,
            is_tied: self.is_tied,
            by_tiles: false,
            is_multiplied: false,
            is_adapter: false,
            is_inner: self.asker.block() > 0 && !self.is_head,
            is_used_at_times: self.is_used_at_times,
        }
    }

    /// What stands before the names of parameters, without the last dot.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The store behind this builder.
    pub fn store(&self) -> &ParamStore {
        &self.store
    }

    /// Type of the parameters.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where the parameters live.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// A candle `VarBuilder` at this prefix, for layers that are not parallel. What they ask for is held by every
    /// tensor-parallel rank, and is trained, counted and saved like any other parameter.
    pub fn var_builder(&self) -> candle_nn::VarBuilder<'static> {
        candle_nn::VarBuilder::from_backend(Box::new(self.clone()), self.dtype, self.device.clone())
    }
}

impl SimpleBackend for ParamBuilder {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let placement = Placement::Replicated(self.gradient);
        let request = self.request(shape, name, placement, init);
        self.check_is_no_buffer(&request.name)?;
        if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
            bail!(
                "parameter {} is asked for as {}; expected f32, bf16 or f16, which can be trained",
                request.name,
                dtype.as_str()
            );
        }
        if !device.same_device(&self.device) {
            bail!(
                "parameter {} is asked for on {:?}, but this builder's parameters are on {:?}\nhint: all parameters of a rank are on \
                 the device of its mesh",
                request.name,
                device.location(),
                self.device.location()
            );
        }
        self.store.get(ParamRequest { dtype, ..request })
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let shape = self.store.stored_shape(&self.path(name))?;
        SimpleBackend::get(self, shape, name, WEIGHT_INIT, dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.store.contains(&self.path(name))
    }
}
