//! How layers ask for their parameters: a store, a prefix of names and the block that asks.

use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::Init;
use candle_nn::var_builder::SimpleBackend;

use super::placement::{Gradient, Placement};
use super::store::{ParamRequest, ParamStore};
use super::tiled_weight::TiledWeight;
use crate::lora::{DropoutPass, LoraConfig};

/// Initial distribution of weight matrices when there is no checkpoint: N(0, 0.02²), as in Llama.
pub const WEIGHT_INIT: Init = Init::Randn {
    mean: 0.0,
    stdev: 0.02,
};

const REPLICATED: Placement = Placement::Replicated(Gradient::Complete);

/// Hands out parameters under a prefix, as candle's `VarBuilder` does, for layers that may hold only a part of them.
#[derive(Clone)]
pub struct ParamBuilder {
    store: ParamStore,
    prefix: String,
    dtype: DType,
    device: Device,
    block: usize,
    /// Whether that is the last block of the model.
    is_head: bool,
}

impl ParamBuilder {
    pub(crate) fn new(store: ParamStore, dtype: DType, device: Device) -> Self {
        Self {
            store,
            prefix: String::new(),
            dtype,
            device,
            block: 0,
            is_head: false,
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
            block: index,
            is_head: index + 1 == num_blocks,
            ..self.clone()
        }
    }

    fn path(&self, name: &str) -> String {
        match self.prefix.as_str() {
            "" => name.to_string(),
            prefix => format!("{prefix}.{name}"),
        }
    }

    /// A whole parameter of the given shape, which every tensor-parallel rank uses on the same values; `init` is its
    /// distribution if there is no checkpoint. One that ranks use on different values, inside a tensor-parallel region, needs
    /// [`Self::get_placed`] with [`Gradient::Partial`]: with this method it is an error in the first step.
    pub fn get(&self, shape: impl Into<Shape>, name: &str, init: Init) -> Result<Tensor> {
        self.get_placed(shape, name, REPLICATED, init)
    }

    /// What this rank holds, according to `placement`, of a parameter whose global shape is `shape`.
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

    /// The low-rank adapters of the model, if the linear layer at this prefix has one, and what tells it of training passes.
    pub(crate) fn lora(&self) -> Option<(LoraConfig, DropoutPass)> {
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
            block: self.block,
            by_tiles: false,
            is_adapter: false,
            is_inner: self.block > 0 && !self.is_head,
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
        _dtype: DType,
        _device: &Device,
    ) -> Result<Tensor> {
        let request = self.request(shape, name, REPLICATED, init);
        self.store.get(request)
    }

    fn get_unchecked(&self, name: &str, _dtype: DType, _device: &Device) -> Result<Tensor> {
        let shape = self.store.stored_shape(&self.path(name))?;
        let request = self.request(shape, name, REPLICATED, WEIGHT_INIT);
        self.store.get(request)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.store.contains(&self.path(name))
    }
}
