//! Started forms: they return at once, and the result comes from `Pending::wait`. They act on dim 0.

use candle_core::{DType, Result, Tensor};

use super::{ProcessGroup, dims};
use crate::device::empty;
use crate::{Operation, Pending, ReduceOp};

impl ProcessGroup {
    /// Starts an [`all_reduce`](Self::all_reduce). `xs` must not be written to before the wait.
    ///
    /// # Errors
    /// Wrong arguments and ranks known to have failed; everything else comes from the wait.
    #[track_caller]
    pub fn start_all_reduce(&self, xs: &Tensor, op: ReduceOp) -> Result<Pending<Tensor>> {
        self.start_one(Operation::AllReduce(op), xs)
    }

    /// Starts an [`all_gather`](Self::all_gather) along dim 0. `xs` must not be written to before the wait.
    ///
    /// # Errors
    /// A tensor without dims; else as [`start_all_reduce`](Self::start_all_reduce).
    #[track_caller]
    pub fn start_all_gather(&self, xs: &Tensor) -> Result<Pending<Tensor>> {
        dims::check_dim("all_gather", xs, 0)?;
        self.start_one(Operation::AllGather, xs)
    }

    /// Starts a [`reduce_scatter`](Self::reduce_scatter) along dim 0. `xs` must not be written to before the wait.
    ///
    /// # Errors
    /// A dim 0 that the group does not divide; else as [`start_all_reduce`](Self::start_all_reduce).
    #[track_caller]
    pub fn start_reduce_scatter(&self, xs: &Tensor, op: ReduceOp) -> Result<Pending<Tensor>> {
        dims::check_divides("reduce_scatter", xs, 0, self.world_size())?;
        self.start_one(Operation::ReduceScatter(op), xs)
    }

    /// Starts a [`broadcast`](Self::broadcast). `xs` must not be written to before the wait.
    ///
    /// # Errors
    /// A root outside the group; else as [`start_all_reduce`](Self::start_all_reduce).
    #[track_caller]
    pub fn start_broadcast(&self, xs: &Tensor, root: usize) -> Result<Pending<Tensor>> {
        self.check_rank("broadcast", "root", root)?;
        self.start_one(Operation::Broadcast { root }, xs)
    }

    /// Starts an [`all_to_all`](Self::all_to_all) along dim 0. `xs` must not be written to before the wait.
    ///
    /// # Errors
    /// A dim 0 that the group does not divide; else as [`start_all_reduce`](Self::start_all_reduce).
    #[track_caller]
    pub fn start_all_to_all(&self, xs: &Tensor) -> Result<Pending<Tensor>> {
        dims::check_divides("all_to_all", xs, 0, self.world_size())?;
        self.start_one(Operation::AllToAll, xs)
    }

    /// Starts a [`barrier`](Self::barrier): the wait returns once every rank of the group has started it.
    ///
    /// # Errors
    /// Ranks known to have failed; everything else comes from the wait.
    #[track_caller]
    pub fn start_barrier(&self) -> Result<Pending<()>> {
        if self.is_single() {
            return Ok(Pending::ready(()));
        }
        let nothing = empty(0, DType::U8, self.device())?;
        Ok(self
            .start(Operation::Barrier, &[nothing], None)?
            .map(|_| Ok(())))
    }
}
