//! What a backend provides.

use candle_core::{DType, Device, Result, Shape, Tensor};

use crate::Pending;

/// How a reduction combines the values of the ranks, elementwise and in rank order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum. bf16 and f16 are accumulated in f32 and rounded once, but with [`HalfSums::Native`](crate::HalfSums); integers wrap.
    Sum,
    /// The largest value. A NaN on any rank gives NaN.
    Max,
}

impl std::fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Max => "max",
        })
    }
}

/// One entry of [`batch_send_recv`](crate::ProcessGroup::batch_send_recv).
///
/// Between two ranks of a group messages arrive in the order in which they were sent. All entries of a batch are in
/// flight together, so two ranks that send to each other in one batch cannot deadlock.
#[derive(Debug, Clone)]
pub enum P2p<'a> {
    /// Sends a tensor. It is copied when the batch starts; the caller may write to it afterwards.
    Send {
        /// What to send.
        xs: &'a Tensor,
        /// The rank, in the group, that receives it.
        dst: usize,
    },
    /// Receives a tensor.
    Recv {
        /// The shape that the message must have.
        shape: Shape,
        /// The dtype that the message must have.
        dtype: DType,
        /// The rank, in the group, that sends it.
        src: usize,
    },
}

/// One rank's end of a group: all that a backend provides.
///
/// Use it through [`ProcessGroup`](crate::ProcessGroup), which checks arguments, handles any dim, skips groups of
/// one and counts. A backend may rely on those checks: tensors are contiguous, ranks are in range, sizes divide.
///
/// Collectives act on dim 0 of contiguous tensors and return as soon as they are started; the result, and any error
/// about what the other ranks do, comes from [`Pending::wait`]. Every rank of the group must call the same
/// operations in the same order, with the same shape and dtype. The caller must not write to an input before it has
/// waited. Results are new storages, shared with nobody, without a gradient graph.
pub trait Communicator: Send + Sync {
    /// This rank's index in the group.
    fn rank(&self) -> usize;

    /// The number of ranks in the group.
    fn world_size(&self) -> usize;

    /// The device on which this rank's tensors live.
    fn device(&self) -> &Device;

    /// Bytes that travel for each value of a reduction, where a backend does not send values as they are.
    fn bytes_per_reduced_value(&self, _op: ReduceOp, dtype: DType) -> usize {
        dtype.size_in_bytes()
    }

    /// `(n, ..) -> (n, ..)`: the elementwise reduction over the ranks, on every rank.
    #[track_caller]
    fn all_reduce(&self, xs: &Tensor, op: ReduceOp) -> Result<Pending<Tensor>>;

    /// `(n, ..) -> (world_size * n, ..)`: the ranks' tensors one after the other, on every rank.
    #[track_caller]
    fn all_gather(&self, xs: &Tensor) -> Result<Pending<Tensor>>;

    /// `(world_size * n, ..) -> (n, ..)`: this rank's slice of the elementwise reduction.
    #[track_caller]
    fn reduce_scatter(&self, xs: &Tensor, op: ReduceOp) -> Result<Pending<Tensor>>;

    /// `(n, ..) -> (n, ..)`: [`all_reduce`](Self::all_reduce) into `xs`, which has elements; the result is `xs`. A backend that
    /// cannot write there copies the result, as for the other forms in place.
    #[track_caller]
    fn all_reduce_in_place(&self, xs: &Tensor, op: ReduceOp) -> Result<Pending<Tensor>> {
        Ok(copied_to(xs.detach(), self.all_reduce(xs, op)?))
    }

    /// `(world_size * n, ..) -> (n, ..)`: [`reduce_scatter`](Self::reduce_scatter) into this rank's slice of `xs`, which has
    /// elements; the result is a view of the slice, and the other slices keep their values.
    #[track_caller]
    fn reduce_scatter_in_place(&self, xs: &Tensor, op: ReduceOp) -> Result<Pending<Tensor>> {
        let slice = own_slice(self, &xs.detach())?;
        Ok(copied_to(slice, self.reduce_scatter(xs, op)?))
    }

    /// `(world_size * n, ..) -> (world_size * n, ..)`: [`all_gather`](Self::all_gather) of each rank's own slice of `xs`, which
    /// has elements, into the other slices; the result is `xs`.
    #[track_caller]
    fn all_gather_in_place(&self, xs: &Tensor) -> Result<Pending<Tensor>> {
        let pending = self.all_gather(&own_slice(self, xs)?)?;
        Ok(copied_to(xs.detach(), pending))
    }

    /// `(n, ..) -> (n, ..)`: root's tensor on every rank. `xs` has the same shape and dtype on all ranks; its values
    /// matter on the root only.
    #[track_caller]
    fn broadcast(&self, xs: &Tensor, root: usize) -> Result<Pending<Tensor>>;

    /// `(world_size * n, ..) -> (world_size * n, ..)`: slice `j` goes to rank `j`; what came from rank `i` is slice `i`.
    #[track_caller]
    fn all_to_all(&self, xs: &Tensor) -> Result<Pending<Tensor>>;

    /// Starts all sends and receives of `ops` together; the result holds the received tensors in the order of the
    /// `Recv` entries.
    #[track_caller]
    fn batch_send_recv(&self, ops: &[P2p<'_>]) -> Result<Pending<Vec<Tensor>>>;

    /// Complete once every rank of the group has started it.
    #[track_caller]
    fn barrier(&self) -> Result<Pending<()>>;

    /// Splits the group: the ranks that pass the same `color` form a new group, ordered by `key`, then by rank.
    /// Every rank of this group must call it.
    #[track_caller]
    fn split(&self, color: usize, key: usize) -> Result<Box<dyn Communicator>>;

    /// Notes which training step this rank is at and what it does there, for messages about ranks that failed. A backend that
    /// has no such messages ignores it.
    fn set_step(&self, _step: u64, _phase: &'static str) {}

    /// An error if the group has failed. On GPUs failures come late, and leave results unwritten: ask it after values have been
    /// read on the host, before they are believed. A backend whose waits wait for the results has nothing to say.
    fn check(&self) -> Result<()> {
        Ok(())
    }
}

/// This rank's slice of `xs` along dim 0.
pub(crate) fn own_slice(comm: &(impl Communicator + ?Sized), xs: &Tensor) -> Result<Tensor> {
    let len = xs.dim(0)? / comm.world_size();
    xs.narrow(0, comm.rank() * len, len)
}

/// A result in `place`, copied there by the wait.
fn copied_to(place: Tensor, pending: Pending<Tensor>) -> Pending<Tensor> {
    Pending::new(move || {
        let result = pending.wait_uncounted()?.flatten_all()?;
        place.flatten_all()?.slice_set(&result, 0, 0)?;
        Ok(place)
    })
}
