//! Started forms: they return at once, and the result comes from `Pending::wait`. They act on dim 0.

use candle_core::{Result, Tensor};

use super::{ProcessGroup, dims, size_in_bytes};
use crate::{Error, P2p, Pending, ReduceOp};

impl ProcessGroup {
    /// Starts an [`all_reduce`](Self::all_reduce). `xs` must not be written to before the wait.
    ///
    /// # Errors
    /// Wrong arguments and ranks known to have failed; everything else comes from the wait.
    #[track_caller]
    pub fn start_all_reduce(&self, xs: &Tensor, op: ReduceOp) -> Result<Pending<Tensor>> {
        if self.is_single() {
            return Ok(Pending::ready(xs.detach()));
        }
        let bytes = self.ring_bytes(2, self.reduced_bytes(xs, op));
        let xs = dims::contiguous(xs)?;
        self.start(("all_reduce", bytes), || self.comm.all_reduce(&xs, op))
    }

    /// Starts an [`all_gather`](Self::all_gather) along dim 0. `xs` must not be written to before the wait.
    ///
    /// # Errors
    /// A tensor without dims; else as [`start_all_reduce`](Self::start_all_reduce).
    #[track_caller]
    pub fn start_all_gather(&self, xs: &Tensor) -> Result<Pending<Tensor>> {
        dims::check_dim("all_gather", xs, 0)?;
        if self.is_single() {
            return Ok(Pending::ready(xs.detach()));
        }
        let bytes = self.ring_bytes(1, self.world_size() * size_in_bytes(xs));
        let xs = dims::contiguous(xs)?;
        self.start(("all_gather", bytes), || self.comm.all_gather(&xs))
    }

    /// Starts a [`reduce_scatter`](Self::reduce_scatter) along dim 0. `xs` must not be written to before the wait.
    ///
    /// # Errors
    /// A dim 0 that the group does not divide; else as [`start_all_reduce`](Self::start_all_reduce).
    #[track_caller]
    pub fn start_reduce_scatter(&self, xs: &Tensor, op: ReduceOp) -> Result<Pending<Tensor>> {
        dims::check_divides("reduce_scatter", xs, 0, self.world_size())?;
        if self.is_single() {
            return Ok(Pending::ready(xs.detach()));
        }
        let bytes = self.ring_bytes(1, self.reduced_bytes(xs, op));
        let xs = dims::contiguous(xs)?;
        self.start(("reduce_scatter", bytes), || {
            self.comm.reduce_scatter(&xs, op)
        })
    }

    /// Starts a [`broadcast`](Self::broadcast). `xs` must not be written to before the wait.
    ///
    /// # Errors
    /// A root outside the group; else as [`start_all_reduce`](Self::start_all_reduce).
    #[track_caller]
    pub fn start_broadcast(&self, xs: &Tensor, root: usize) -> Result<Pending<Tensor>> {
        self.check_rank("broadcast", "root", root)?;
        if self.is_single() {
            return Ok(Pending::ready(xs.detach()));
        }
        let bytes = self.ring_bytes(1, size_in_bytes(xs));
        let xs = dims::contiguous(xs)?;
        self.start(("broadcast", bytes), || self.comm.broadcast(&xs, root))
    }

    /// Starts an [`all_to_all`](Self::all_to_all) along dim 0. `xs` must not be written to before the wait.
    ///
    /// # Errors
    /// A dim 0 that the group does not divide; else as [`start_all_reduce`](Self::start_all_reduce).
    #[track_caller]
    pub fn start_all_to_all(&self, xs: &Tensor) -> Result<Pending<Tensor>> {
        dims::check_divides("all_to_all", xs, 0, self.world_size())?;
        if self.is_single() {
            return Ok(Pending::ready(xs.detach()));
        }
        let bytes = self.ring_bytes(1, size_in_bytes(xs));
        let xs = dims::contiguous(xs)?;
        self.start(("all_to_all", bytes), || self.comm.all_to_all(&xs))
    }

    /// Starts a [`batch_send_recv`](Self::batch_send_recv).
    ///
    /// # Errors
    /// A rank outside the group or this rank itself; else as [`start_all_reduce`](Self::start_all_reduce).
    #[track_caller]
    pub fn start_batch_send_recv(&self, ops: &[P2p<'_>]) -> Result<Pending<Vec<Tensor>>> {
        let mut sends = Vec::new();
        for op in ops {
            let (role, peer) = match op {
                P2p::Send { dst, .. } => ("dst", *dst),
                P2p::Recv { src, .. } => ("src", *src),
            };
            self.check_rank("batch_send_recv", role, peer)?;
            if peer == self.rank() {
                return Err(Error::Argument(format!(
                    "batch_send_recv: {role} {peer} is this rank itself"
                ))
                .into());
            }
            if let P2p::Send { xs, .. } = op {
                sends.push(dims::contiguous(xs)?);
            }
        }
        if ops.is_empty() {
            return Ok(Pending::ready(Vec::new()));
        }
        let bytes = sends.iter().map(|xs| size_in_bytes(xs) as u64).sum();
        let mut sends = sends.iter();
        let ops: Vec<P2p<'_>> = ops
            .iter()
            .map(|op| {
                match (
                    op,
                    matches!(op, P2p::Send { .. })
                        .then(|| sends.next())
                        .flatten(),
                ) {
                    (P2p::Send { dst, .. }, Some(xs)) => P2p::Send { xs, dst: *dst },
                    _ => op.clone(),
                }
            })
            .collect();
        self.start(("batch_send_recv", bytes), || {
            self.comm.batch_send_recv(&ops)
        })
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
        self.start(("barrier", 0), || self.comm.barrier())
    }
}
