//! What a backend provides.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use candle_launch::Ticket;

use crate::operation::call::Call;
use crate::{Operation, Pending, ReduceOp};

/// What a rank asks of a group.
pub struct Request<'a> {
    /// What to do.
    pub operation: &'a Operation,
    /// The tensors that it takes.
    pub tensors: &'a [Tensor],
    /// Where the result goes, which is this tensor then, unless it is new: one with elements, of the result's shape, that may share
    /// memory with the input where the operation leaves the values that are there, or where it is the input.
    pub place: Option<&'a Tensor>,
    /// The same in words, with its place in the user's code and its number in the group.
    pub(crate) call: Call,
    /// By which the run's control plane knows it. A backend whose operations last longer than the wait for them takes it, and drops it
    /// when the operation is complete.
    pub(crate) ticket: Option<Ticket>,
}

impl<'a> Request<'a> {
    /// What the caller of this asks of the group of these world ranks, by its number among the collectives there, from 0, if it is one.
    #[track_caller]
    pub fn new(
        operation: &'a Operation,
        tensors: &'a [Tensor],
        place: Option<&'a Tensor>,
        (members, seq): (&Arc<[usize]>, Option<u64>),
    ) -> Self {
        Self {
            operation,
            tensors,
            place,
            call: Call::new(operation, tensors, members, seq),
            ticket: None,
        }
    }
}

/// One rank's end of a group: all that a backend provides.
///
/// Use it through [`ProcessGroup`](crate::ProcessGroup), which checks arguments, handles any dim, skips groups of
/// one and counts. A backend may rely on those checks: tensors are contiguous, ranks are in range, sizes divide.
///
/// Operations return as soon as they are started; the result, and any error about what the other ranks do, comes from
/// [`Pending::wait`]. Every rank of the group must start the same operations in the same order, with the same shape and dtype.
/// The caller must not write to an input before it has waited. Results have no gradient graph, and are new storages, shared with
/// nobody, unless the request says where they go.
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

    /// Whether values are added in an order that follows from the ranks alone, not from their place in the tensor or in the network: then
    /// groups whose ranks have the same summands get the same bits.
    fn sums_in_rank_order(&self) -> bool {
        true
    }

    /// Starts an operation.
    ///
    /// # Errors
    /// The operation cannot start: the group has failed, or the request does not fit the backend.
    fn start(&self, request: &mut Request<'_>) -> Result<Pending<Vec<Tensor>>>;

    /// A number that this rank's [`Operation::Split`] brings to the others, for the [`subgroup`](Self::subgroup) that follows.
    fn subgroup_number(&self) -> i64 {
        0
    }

    /// A group of these ranks of this one, in this order, among them this rank, each with its
    /// [`subgroup_number`](Self::subgroup_number). Every rank of this group must call it, after an [`Operation::Split`], each with
    /// the new group that it is in.
    ///
    /// # Errors
    /// The group has failed, or its ranks were split otherwise.
    fn subgroup(&self, ranks: &[usize], numbers: &[i64]) -> Result<Box<dyn Communicator>>;

    /// An error if the group has failed. On GPUs failures come late, and leave results unwritten: ask it after values have been
    /// read on the host, before they are believed. A backend whose waits wait for the results has nothing to say.
    ///
    /// # Errors
    /// That of the group: which rank failed, and why.
    fn check(&self) -> Result<()> {
        Ok(())
    }
}
