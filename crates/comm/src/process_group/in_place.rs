//! Started collectives whose result takes the place of what this rank holds of it. They act on dim 0.
//!
//! Until the wait nothing in the storage of the tensor may be read or written, its other views included; after a wait that ended
//! in an error, what the storage holds may still change.

use candle_core::{Result, Tensor};

use super::{ProcessGroup, dims};
use crate::error::argument;
use crate::{Operation, Pending, ReduceOp};

impl ProcessGroup {
    /// Starts an [`all_reduce`](Self::all_reduce) whose result overwrites `xs`, and is `xs`, which must not be read or written to
    /// before the wait.
    ///
    /// # Shapes
    /// `(..)`, contiguous -> the same
    ///
    /// # Errors
    /// Values that are not contiguous; everything else comes from the wait.
    #[track_caller]
    pub fn start_all_reduce_in_place(&self, xs: &Tensor, op: ReduceOp) -> Result<Pending<Tensor>> {
        let xs = contiguous("all_reduce", xs)?;
        self.start_one(Operation::AllReduce(op), &xs, Some(xs.clone()))
    }

    /// Starts a [`reduce_scatter`](Self::reduce_scatter) along dim 0 whose result overwrites this rank's slice of `xs`, and is a
    /// view of it. The other slices keep their values. `xs` must not be read or written to before the wait.
    ///
    /// # Shapes
    /// `(world_size * n, ..)`, contiguous -> `(n, ..)`
    ///
    /// # Errors
    /// A dim 0 that the group does not divide, and values that are not contiguous; everything else comes from the wait.
    #[track_caller]
    pub fn start_reduce_scatter_in_place(
        &self,
        xs: &Tensor,
        op: ReduceOp,
    ) -> Result<Pending<Tensor>> {
        let (xs, own) = self.with_own_slice("reduce_scatter", xs)?;
        self.start_one(Operation::ReduceScatter(op), &xs, Some(own))
    }

    /// Starts an [`all_gather`](Self::all_gather) along dim 0 of each rank's own slice of `xs`, which overwrites the others; the
    /// result is `xs`. `xs` must not be read or written to before the wait.
    ///
    /// # Shapes
    /// `(world_size * n, ..)`, contiguous -> the same
    ///
    /// # Errors
    /// As [`start_reduce_scatter_in_place`](Self::start_reduce_scatter_in_place).
    #[track_caller]
    pub fn start_all_gather_in_place(&self, xs: &Tensor) -> Result<Pending<Tensor>> {
        let (xs, own) = self.with_own_slice("all_gather", xs)?;
        self.start_one(Operation::AllGather, &own, Some(xs))
    }

    /// The values, and this rank's slice of them along dim 0.
    fn with_own_slice(&self, operation: &str, xs: &Tensor) -> Result<(Tensor, Tensor)> {
        dims::check_divides(operation, xs, 0, self.world_size())?;
        let xs = contiguous(operation, xs)?;
        let len = xs.dim(0)? / self.world_size();
        let own = xs.narrow(0, self.rank() * len, len)?;
        Ok((xs, own))
    }
}

/// The values, without a graph, if their place can take a result.
fn contiguous(operation: &str, xs: &Tensor) -> Result<Tensor> {
    if xs.is_contiguous() {
        return Ok(xs.detach());
    }
    Err(argument(format!(
        "{operation} in place: expected contiguous values, got strides {:?} of shape {:?}",
        xs.stride(),
        xs.dims()
    )))
}
