//! One parameter as its rank sees it.

use std::ops::Range;

use candle_core::{DType, Result, Shape, Tensor, Var};

use crate::shard::Shard;

/// A parameter, or the part of it that this rank holds.
#[derive(Clone, Debug)]
pub struct Param {
    /// Hugging Face name; the name in every file.
    pub name: String,
    /// The local values.
    pub var: Var,
    /// Shape of the whole parameter.
    pub global_shape: Shape,
    /// The part held here; `None`: all of it, on every tensor-parallel rank.
    pub shard: Option<Shard>,
    /// Blocks of the chain that use it, in the order of construction. The first one's bucket holds its gradient.
    pub blocks: Vec<usize>,
    /// Whether it gets a gradient and an update.
    pub trainable: bool,
    /// Type in the checkpoint it came from, and in which it is saved unless asked otherwise.
    pub stored_dtype: DType,
}

impl Param {
    /// What layers compute with: the variable itself, or a constant if the parameter is frozen, so that no gradient is
    /// computed for it.
    pub fn tensor(&self) -> Tensor {
        if self.trainable {
            self.var.as_tensor().clone()
        } else {
            self.var.as_detached_tensor()
        }
    }

    /// A flat view of some of the local values, given as row-major offsets; outside of any graph.
    pub(crate) fn flat_part(&self, offsets: &Range<usize>) -> Result<Tensor> {
        let values = self.var.as_detached_tensor().flatten_all()?;
        values.narrow(0, offsets.start, offsets.len())
    }

    /// Number of values held here.
    pub fn num_values(&self) -> usize {
        self.var.elem_count()
    }

    /// Memory of the values held here.
    pub fn num_bytes(&self) -> usize {
        self.num_values() * self.var.dtype().size_in_bytes()
    }

    /// The parts of the local values, as ranges of row-major offsets, that lie in this rank's [`Shard::owned`].
    pub(crate) fn owned_offsets(&self) -> Vec<Range<usize>> {
        let Some(shard) = &self.shard else {
            return std::iter::once(0..self.num_values()).collect();
        };
        if shard.owned == shard.range {
            return std::iter::once(0..self.num_values()).collect();
        }
        let dims = self.var.dims();
        let inner: usize = dims[shard.dim + 1..].iter().product();
        let outer: usize = dims[..shard.dim].iter().product();
        let stride = shard.len() * inner;
        let first = (shard.owned.start - shard.range.start) * inner;
        let len = shard.owned.len() * inner;
        (0..outer)
            .map(|row| row * stride + first..row * stride + first + len)
            .filter(|range| !range.is_empty())
            .collect()
    }
}
