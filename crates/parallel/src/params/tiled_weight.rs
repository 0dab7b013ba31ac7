//! Weights of which a layer uses some rows at a time, so that with ZeRO-3 or offloaded weights only these need to be here: memory-centric tiling
//! (arXiv:2104.07857, section 5.1.3); or so that only these need to be unpacked, of frozen weights that are held in fewer bits.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use candle_core::{D, DType, Result, Tensor};
use candle_ops::{LinearWeight, PackedWeight, linear_of_few_rows};

use super::packed_weights::KeptWeight;
use super::sharded_weights::ShardedWeights;
use super::weight_format::Packing;

/// A weight whose rows (dim 0) a layer can use tile by tile: see [`DataParallel::tile_linears`](crate::DataParallel::tile_linears) and
/// [`ParamStore::with_frozen_format`](crate::ParamStore::with_frozen_format).
///
/// Without these, and made from a tensor, it is one tile.
#[derive(Clone)]
pub struct TiledWeight {
    whole: Tensor,
    packing: Option<Packing>,
    /// Its packed form, which stays.
    kept_packed: Option<Arc<KeptWeight>>,
    divided: Option<Divided>,
}

/// Where the tiles of a weight come from if replicas divide it, or it is offloaded.
#[derive(Clone)]
struct Divided {
    name: String,
    /// Empty until the model is built, and if all weights are here.
    weights: Arc<OnceLock<ShardedWeights>>,
}

impl From<Tensor> for TiledWeight {
    fn from(whole: Tensor) -> Self {
        Self {
            whole,
            packing: None,
            kept_packed: None,
            divided: None,
        }
    }
}

impl TiledWeight {
    pub(super) fn new(
        whole: Tensor,
        name: String,
        packing: Option<Packing>,
        weights: &Arc<OnceLock<ShardedWeights>>,
    ) -> Self {
        let weights = weights.clone();
        Self {
            whole,
            packing,
            kept_packed: None,
            divided: Some(Divided { name, weights }),
        }
    }

    /// The same weight, which stays packed where it is whole.
    pub(super) fn kept_packed(self, kept: Arc<KeptWeight>) -> Self {
        Self {
            kept_packed: Some(kept),
            ..self
        }
    }

    /// The whole weight for a product; not where it [is tiled](Self::is_tiled).
    pub(crate) fn whole(&self) -> LinearWeight<'_> {
        LinearWeight {
            values: &self.whole,
            packed: self.packed(),
        }
    }

    /// The packed form of the whole weight: none where replicas divide weights or they are offloaded.
    fn packed(&self) -> Option<&PackedWeight> {
        let is_divided = |divided: &Divided| divided.weights.get().is_some();
        let is_divided = self.divided.as_ref().is_some_and(is_divided);
        let kept = self.kept_packed.as_ref().filter(|_| !is_divided);
        kept.and_then(|kept| kept.get())
    }

    /// The parameter: the identity by which its gradient is found. Its values are not here if [`Self::is_tiled`].
    pub fn tensor(&self) -> &Tensor {
        &self.whole
    }

    /// Shape of the values, (rows, columns).
    ///
    /// # Errors
    /// Values that have another number of dims.
    pub fn dims2(&self) -> Result<(usize, usize)> {
        match &self.packing {
            None => self.whole.dims2(),
            Some(packing) => Ok(packing.dims().into()),
        }
    }

    /// Type of the tiles.
    pub fn dtype(&self) -> DType {
        let packing = self.packing.as_ref();
        packing.map_or(self.whole.dtype(), Packing::dtype)
    }

    /// Bytes of a row of the weight's input and of its output, in the type that a layer computes with.
    pub(crate) fn row_bytes(&self) -> (usize, usize) {
        let value = self.dtype().size_in_bytes();
        let (rows, columns) = self.dims2().unwrap_or_default();
        (value * columns, value * rows)
    }

    /// Whether it comes tile by tile, from the replicas that divide it, from where it is offloaded to, or out of the form in which it is held.
    pub fn is_tiled(&self) -> bool {
        self.tiled().is_some() || self.packing.is_some()
    }

    /// The whole weight as it is held, if it is here and holds numbers, perhaps of another type than the tiles.
    pub(crate) fn held_floats(&self) -> Option<&Tensor> {
        let is_float = self.packing.as_ref().is_none_or(Packing::is_float);
        (is_float && self.tiled().is_none()).then_some(&self.whole)
    }

    /// The slices of this weight if it comes tile by tile, and its name.
    fn tiled(&self) -> Option<(&ShardedWeights, &str)> {
        let Divided { name, weights } = self.divided.as_ref()?;
        let weights = weights.get()?;
        weights.is_tiled(name).then_some((weights, name.as_str()))
    }

    /// Calls `use_tile` with each tile and its rows, in order. A tile is freed when the call has returned, and the next one is
    /// on its way meanwhile if communication overlaps; between ranks that offload weights it has been fetched before. With ZeRO-3 all replicas must call it, for the same weights in the same order.
    ///
    /// # Errors
    /// What `use_tile` returns, and failures of ranks.
    pub fn for_each_tile(
        &self,
        mut use_tile: impl FnMut(Range<usize>, &Tensor) -> Result<()>,
    ) -> Result<()> {
        let num_rows = self.whole.dim(0)?;
        let mut use_tile = |rows: Range<usize>, held: &Tensor| match &self.packing {
            None => use_tile(rows, held),
            Some(packing) => {
                let starts = rows.clone().step_by(packing.tile_rows());
                starts.into_iter().try_for_each(|start| {
                    let end = rows.end.min(start + packing.tile_rows());
                    let held = held.narrow(0, start - rows.start, end - start)?;
                    use_tile(start..end, &packing.unpack(&held)?)
                })
            }
        };
        let Some((weights, name)) = self.tiled() else {
            return use_tile(0..num_rows, &self.whole);
        };
        let tiles = weights.tiles(name);
        let num_tiles = tiles.len();
        let start = |tile| weights.start_tile(name, tile);
        let mut started = None;
        for (tile, rows) in tiles.enumerate() {
            let (values, _held) = started.take().map_or_else(|| start(tile), Ok)?.wait()?;
            if weights.prefetches() && tile + 1 < num_tiles {
                started = Some(start(tile + 1)?);
            }
            let shape = [&[rows.len()], &self.whole.dims()[1..]].concat();
            use_tile(rows, &values.reshape(shape)?)?;
        }
        Ok(())
    }

    /// As [`Self::for_each_tile`], for products: the whole weight, if it is here, as it stays packed.
    pub(crate) fn for_each_part(
        &self,
        mut use_part: impl FnMut(Range<usize>, LinearWeight<'_>) -> Result<()>,
    ) -> Result<()> {
        match self.is_tiled() {
            true => self.for_each_tile(|rows, tile| use_part(rows, tile.into())),
            false => use_part(0..self.whole.dim(0)?, self.whole()),
        }
    }

    /// `xs W^T + bias`, rounded once, or `residual + xs W^T` rounded once, then `bias` added.
    ///
    /// # Shapes
    /// `xs (.., in)`, the weight (out, in), `bias (out)`, `residual (.., out)` -> `(.., out)`; one type.
    ///
    /// # Errors
    /// Shapes or types that do not fit, and as [`Self::for_each_tile`].
    pub fn linear(
        &self,
        xs: &Tensor,
        bias: Option<&Tensor>,
        residual: Option<&Tensor>,
    ) -> Result<Tensor> {
        let (bias, bias_after) = match residual {
            Some(_) => (None, bias),
            None => (bias, None),
        };
        let ys = match self.few_rows(xs, bias, residual)? {
            Some(ys) => ys,
            None => self.by_tiles(xs, bias, residual)?,
        };
        match bias_after {
            Some(bias) => ys.broadcast_add(bias),
            None => Ok(ys),
        }
    }

    /// The product of few rows with a weight that is here and packed, which need not be unpacked for them.
    fn few_rows(
        &self,
        xs: &Tensor,
        bias: Option<&Tensor>,
        residual: Option<&Tensor>,
    ) -> Result<Option<Tensor>> {
        let packing = self.packing.as_ref().filter(|_| self.tiled().is_none());
        let of_packed =
            |packing: &Packing| linear_of_few_rows(xs, &self.whole, packing.rows(), bias, residual);
        packing.map_or(Ok(None), of_packed)
    }

    fn by_tiles(
        &self,
        xs: &Tensor,
        bias: Option<&Tensor>,
        residual: Option<&Tensor>,
    ) -> Result<Tensor> {
        let mut parts = Vec::new();
        self.for_each_part(|rows, weight| {
            let (first, len) = (rows.start, rows.len());
            let bias = bias.map(|bias| bias.narrow(0, first, len)).transpose()?;
            parts.push(match residual {
                None => weight.forward(xs, bias.as_ref())?,
                Some(residual) => {
                    let residual = residual.narrow(D::Minus1, first, len)?;
                    weight.forward_add(&residual.contiguous()?, xs)?
                }
            });
            Ok(())
        })?;
        match parts.as_slice() {
            [one] => Ok(one.clone()),
            parts => Tensor::cat(parts, D::Minus1),
        }
    }
}
