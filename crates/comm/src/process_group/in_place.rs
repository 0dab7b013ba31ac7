//! Started collectives whose result takes the place of what this rank holds of it. They act on dim 0.
//!
//! Until the wait nothing in the storage of the tensor may be read or written, its other views included; after a wait that ended
//! in an error, what the storage holds may still change.

use candle_core::{Result, Tensor};

use super::{ProcessGroup, dims, size_in_bytes};
use crate::communicator::own_slice;
use crate::{Error, Pending, ReduceOp};

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
        check_contiguous("all_reduce in place", xs)?;
        if self.is_single() || xs.elem_count() == 0 {
            return Ok(Pending::ready(xs.detach()));
        }
        let bytes = self.ring_bytes(2, self.reduced_bytes(xs, op));
        let xs = xs.detach();
        self.start(("all_reduce", bytes), || {
            self.comm.all_reduce_in_place(&xs, op)
        })
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
        let operation = "reduce_scatter in place";
        dims::check_divides(operation, xs, 0, self.world_size())?;
        check_contiguous(operation, xs)?;
        if self.is_single() || xs.elem_count() == 0 {
            return Ok(Pending::ready(own_slice(&*self.comm, &xs.detach())?));
        }
        let bytes = self.ring_bytes(1, self.reduced_bytes(xs, op));
        let xs = xs.detach();
        self.start(("reduce_scatter", bytes), || {
            self.comm.reduce_scatter_in_place(&xs, op)
        })
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
        let operation = "all_gather in place";
        dims::check_divides(operation, xs, 0, self.world_size())?;
        check_contiguous(operation, xs)?;
        if self.is_single() || xs.elem_count() == 0 {
            return Ok(Pending::ready(xs.detach()));
        }
        let bytes = self.ring_bytes(1, size_in_bytes(xs));
        let xs = xs.detach();
        self.start(("all_gather", bytes), || self.comm.all_gather_in_place(&xs))
    }
}

fn check_contiguous(operation: &str, xs: &Tensor) -> Result<()> {
    if xs.is_contiguous() {
        return Ok(());
    }
    Err(Error::Argument(format!(
        "{operation}: expected contiguous values, got strides {:?} of shape {:?}",
        xs.stride(),
        xs.dims()
    ))
    .into())
}
