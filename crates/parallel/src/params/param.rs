//! One parameter as its rank sees it.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Shape, Tensor, TensorId, Var};
use candle_nn::Init;
use serde::{Deserialize, Serialize};

use super::packed_weights::PackedWeights;
use super::pending_weights::PendingWeights;
use super::source::Wanted;
use super::weight_format::{Form, Packing, hold};
use crate::memory::{MemoryCategory, MemoryGuard, MemoryMeter};
use crate::placement::{Indices, Placement, Shard, joined};
use crate::view::View;

/// A parameter, or the part of it that this rank holds.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Param {
    /// Hugging Face name; the name in every file.
    pub name: String,
    /// Shape of the whole parameter.
    pub global_shape: Shape,
    /// How it lies on the tensor-parallel ranks.
    pub placement: Placement,
    /// Blocks of the chain that asked for it, in the order of construction; what was asked for outside of blocks counts as block 0's.
    pub blocks: Vec<usize>,
    /// Who asked for it without [saying](crate::ParamBuilder::tied) that others do too.
    pub(super) asked_by: Option<Asker>,
    /// Its distribution if there is no checkpoint.
    pub(super) init: Init,
    /// Whether it gets a gradient and an update.
    pub trainable: bool,
    /// Whether a micro-batch may leave it without a gradient: see [`ParamBuilder::used_at_times`](crate::ParamBuilder::used_at_times).
    pub(super) is_used_at_times: bool,
    /// Whether every layer that asked for it uses it as a [`TiledWeight`](crate::TiledWeight), and there is more than one tile.
    pub(super) is_tiled: bool,
    /// Blocks whose linear layers multiply with it.
    pub(super) multiplied_by: Vec<usize>,
    /// How the values are held, if not as they are: see [`ParamStore::with_frozen_format`](crate::ParamStore::with_frozen_format).
    pub(super) packing: Option<Packing>,
    /// Whether it is of a low-rank adapter: see [`ParamStore::with_lora`](crate::ParamStore::with_lora).
    pub is_adapter: bool,
    /// Type in the checkpoint it came from, and in which it is saved unless asked otherwise.
    pub stored_dtype: DType,
    /// The local values, shared with the layers.
    pub(super) var: Var,
    /// Updates that other ranks made and that are on the way here.
    pub(super) pending: Arc<PendingWeights>,
    /// Weights that stay in the order of products, to which what is written here is told.
    pub(super) of_products: Arc<PackedWeights>,
}

/// Who asked for a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Asker {
    /// A block of the chain.
    Block(usize),
    /// The program, with a builder that is no block's.
    Outside,
}

impl Asker {
    /// The block whose parameters it counts among.
    pub fn block(self) -> usize {
        match self {
            Self::Block(index) => index,
            Self::Outside => 0,
        }
    }
}

impl std::fmt::Display for Asker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Block(index) => write!(f, "block {index}"),
            Self::Outside => f.write_str("the program, outside of blocks,"),
        }
    }
}

/// Says that a parameter is asked for by two, who do not say that they share it.
pub(super) fn asked_twice(name: &str, first: Asker, second: Asker) -> String {
    let who = match first == second {
        true => format!("{first} asks twice for parameter {name}"),
        false => format!("{first} and {second} ask for parameter {name}"),
    };
    format!(
        "{who}: both would train one weight\nhint: where each should have a weight of its own, give the builder another name by \
         pp(..), such as the block's index; a weight that is shared on purpose is asked for by vb.tied() everywhere but in one place"
    )
}

impl Param {
    /// Whether a block asked for it, and not the program outside of blocks.
    pub(crate) fn is_of_blocks(&self) -> bool {
        self.asked_by != Some(Asker::Outside)
    }

    /// Whether the backward pass of each micro-batch must give it a gradient.
    pub(crate) fn needs_gradient(&self) -> bool {
        self.trainable && self.is_of_blocks() && self.num_values() > 0 && !self.is_used_at_times
    }

    /// The local values, outside of any graph, when all updates have arrived. To change them is for
    /// [`Parameters::set`](crate::Parameters::set) alone.
    ///
    /// # Errors
    /// The values are not here, as they were [released](crate::Parameters::release) or replicas divide them (ZeRO-3: see
    /// [`Parameters::values`](crate::Parameters::values)), or an update does not arrive.
    pub fn values(&self) -> Result<Tensor> {
        self.pending.wait_for_all()?;
        self.check_present()?;
        self.unpacked(self.var.as_detached_tensor())
    }

    /// The values of what is held.
    pub(super) fn unpacked(&self, held: Tensor) -> Result<Tensor> {
        match &self.packing {
            None => Ok(held),
            Some(packing) => packing.unpack(&held),
        }
    }

    /// What is held of the values that its source has.
    pub(super) fn initial(&self, values: Vec<f32>) -> Result<Tensor> {
        let dims = self.local_shape().dims();
        hold(values, self.packing.as_ref(), dims, self.dtype())
    }

    /// What layers compute with: the variable itself, or a constant if the parameter is frozen, so that no gradient is
    /// computed for it.
    /// Unlike [`Self::values`] this does not wait for updates.
    pub fn tensor(&self) -> Tensor {
        if self.trainable {
            self.var.as_tensor().clone()
        } else {
            self.var.as_detached_tensor()
        }
    }

    /// What to ask its source for.
    pub(super) fn wanted(&self) -> Wanted<'_> {
        Wanted {
            name: &self.name,
            shape: &self.global_shape,
            shard: self.shard(),
            init: self.init,
            is_adapter: self.is_adapter,
        }
    }

    /// The identity of the variable, by which its gradient is found.
    pub(crate) fn id(&self) -> TensorId {
        self.var.id()
    }

    pub(crate) fn var(&self) -> &Var {
        &self.var
    }

    pub(super) fn device(&self) -> &Device {
        self.var.device()
    }

    /// Shape of the values held here, or of the bytes that stand for them.
    pub fn local_shape(&self) -> &Shape {
        self.var.shape()
    }

    /// Type in which they are held.
    pub fn dtype(&self) -> DType {
        self.var.dtype()
    }

    /// What the form is called in which they are held: a type, or that of blocks.
    pub fn form(&self) -> &'static str {
        self.held_form().name()
    }

    pub(super) fn held_form(&self) -> Form {
        let packing = self.packing.as_ref();
        packing.map_or(Form::Floats(self.dtype()), Packing::form)
    }

    /// Whether what is held is not the values as they are, and is never written.
    pub(crate) fn is_packed(&self) -> bool {
        self.packing.is_some()
    }

    /// Whether bytes are held here that stand for blocks of values.
    pub(crate) fn is_in_blocks(&self) -> bool {
        self.packing
            .as_ref()
            .is_some_and(|packing| !packing.is_float())
    }

    /// The part held here; `None`: all of it.
    pub fn shard(&self) -> Option<&Shard> {
        self.placement.shard()
    }

    /// A flat view of some of the local values, given as row-major offsets, to be read or updated; outside of any graph.
    pub(crate) fn flat_part(&self, offsets: &Range<usize>) -> Result<Tensor> {
        self.check_present()?;
        let values = self.var.as_detached_tensor().flatten_all()?;
        values.narrow(0, offsets.start, offsets.len())
    }

    /// Counts the values if they are in memory.
    pub(super) fn count(&self, meter: &MemoryMeter) -> Option<MemoryGuard> {
        let bytes = self.is_present().then(|| self.num_bytes());
        bytes.map(|bytes| meter.hold(MemoryCategory::Weights, bytes))
    }

    /// Number of values held here.
    pub fn num_values(&self) -> usize {
        self.var.elem_count()
    }

    /// Memory of the values held here.
    pub fn num_bytes(&self) -> usize {
        self.num_values() * self.dtype().size_in_bytes()
    }

    /// The dim that is cut, and the indices of it held here; of a replicated parameter dim 0 and all.
    pub(crate) fn held(&self) -> (usize, Indices) {
        match self.shard() {
            Some(shard) => (shard.dim(), shard.held().clone()),
            None => {
                let all = 0..self.global_shape.dims().first().copied().unwrap_or(1);
                (0, all.into())
            }
        }
    }

    /// A view of indices `range` of the cut dim, if they are held here, of values that lie here as the parameter's do.
    pub(crate) fn narrow(&self, values: &Tensor, range: &Range<usize>) -> Result<Option<Tensor>> {
        let (dim, held) = self.held();
        let place = held.place(range);
        let narrow = |place: usize| match values.rank() {
            0 => Ok(values.clone()),
            _ => values.narrow(dim, place, range.len()),
        };
        place.map(narrow).transpose()
    }

    /// Indices `part` of the cut dim, which are held here, as rising ranges of row-major offsets into the local values.
    pub(crate) fn local_offsets(&self, part: &Indices) -> Vec<Range<usize>> {
        let own = self.view(0..self.num_values());
        let num_values = own.len() / own.held.len().max(1) * part.len();
        let owned = View {
            held: part.clone(),
            range: 0..num_values,
            ..own.clone()
        };
        let owned = own.common(&owned).into_iter();
        joined(owned.map(|both| both.start..both.start + both.len))
    }

    /// The values at row-major offsets `range` of what is held here.
    pub(crate) fn view(&self, range: Range<usize>) -> View {
        let (dim, held) = self.held();
        View {
            name: self.name.clone(),
            shape: self.global_shape.dims().to_vec(),
            dim,
            held,
            range,
        }
    }
}
