//! A group of ranks as the rest of the code sees it.

mod collectives;
mod dims;
mod in_place;
mod messages;
pub(crate) mod unconnected;
pub(crate) mod watch;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{Device, Result, Tensor};
use candle_launch::Control;

use crate::error::argument;
use crate::process_group::unconnected::Unconnected;
use crate::process_group::watch::Watch;
use crate::reduction::element;
use crate::trace::{self, OpSpan};
use crate::{Communicator, Counters, Error, Operation, Pending, Request};

/// This rank's end of a group of ranks. Clones share the group and its counters.
///
/// It checks arguments, makes inputs contiguous, works along any dim, and counts calls and bytes. A group of one
/// returns its input: no copy (the result shares the input's storage), nothing counted. In larger groups results are
/// new storages. Results carry no gradient graph.
///
/// All ranks of a group must call the same operations in the same order. Several may be in flight, in one group and in several:
/// on threads and over MPI they progress while the ranks compute, and ranks may start those of different groups in different
/// orders. NCCL wants one order over all groups that two ranks share. Calls block the thread, so they must not be
/// made from rayon workers (see [`Pending`](crate::Pending)).
#[derive(Clone)]
pub struct ProcessGroup {
    comm: Arc<dyn Communicator>,
    /// World ranks, by group rank.
    pub(crate) members: Arc<[usize]>,
    /// The number of the next collective.
    next_seq: Arc<AtomicU64>,
    counters: Arc<Mutex<Counters>>,
    /// The axis of the mesh along which it lies.
    axis: &'static str,
    watch: Option<Arc<Watch>>,
}

impl std::fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProcessGroup")
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .finish_non_exhaustive()
    }
}

impl ProcessGroup {
    /// A group over a backend's communicator, whose ranks messages call by their numbers in it.
    pub fn new(comm: Box<dyn Communicator>) -> Self {
        Self {
            members: (0..comm.world_size()).collect(),
            comm: Arc::from(comm),
            next_seq: Arc::default(),
            counters: Arc::default(),
            axis: "world",
            watch: None,
        }
    }

    /// The same group, which lies along this axis of the mesh, as do those that are split off it.
    pub(crate) fn along(self, axis: &'static str) -> Self {
        Self { axis, ..self }
    }

    /// The same group of all ranks, whose operations the run's control plane knows from now on: what a rank does is in the messages
    /// that the others print when it dies or hangs, and the deadline counts.
    ///
    /// With `checks_collectives` no collective starts before all ranks of the group have called the same one on the same shape and
    /// dtype; a difference is an [`Error::Mismatch`] on all of them. Each start then waits for the slowest rank and one round trip
    /// to rank 0. Sends and receives are not compared this way, since they concern two ranks only: backends compare a message with
    /// its receive.
    ///
    /// # Errors
    /// The control plane counts the ranks otherwise than the backend.
    pub fn watched(&self, control: &Arc<Control>, checks_collectives: bool) -> Result<Self> {
        let first_seq = self.next_seq.load(Ordering::Relaxed);
        let watch = Watch::new(&*self.comm, control, (checks_collectives, first_seq))?;
        Ok(Self {
            counters: Arc::default(),
            watch: Some(Arc::new(watch)),
            ..self.clone()
        })
    }

    /// The same group, whose operations are counted with those of `other` from now on.
    pub fn counted_with(self, other: &Self) -> Self {
        Self {
            counters: other.counters.clone(),
            ..self
        }
    }

    /// A world of one rank.
    pub fn single(device: Device) -> Self {
        Self::unconnected(0, 1, device)
    }

    /// Rank `rank` of a group of `world_size` ranks that does not exist, for what follows from a rank's place alone, such as which part of a
    /// parameter it holds. Every operation of it is an error, unless `world_size` is 1.
    pub fn unconnected(rank: usize, world_size: usize, device: Device) -> Self {
        Self::new(Box::new(Unconnected {
            rank,
            world_size,
            device,
        }))
    }

    /// This rank's index in the group.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// Whether sums over more than two ranks depend on nothing but the ranks and what they have: over every backend but NCCL.
    pub fn sums_in_rank_order(&self) -> bool {
        self.world_size() <= 2 || self.comm.sums_in_rank_order()
    }

    /// The number of ranks in the group.
    pub fn world_size(&self) -> usize {
        self.comm.world_size()
    }

    /// The device on which this rank's tensors live.
    pub fn device(&self) -> &Device {
        self.comm.device()
    }

    /// What has been counted since the group was made, or since [`reset_counters`](Self::reset_counters).
    pub fn counters(&self) -> Counters {
        self.lock_counters().clone()
    }

    /// Sets all counters to zero.
    pub fn reset_counters(&self) {
        *self.lock_counters() = Counters::default();
    }

    /// Splits the group: the ranks that pass the same `color` form a new group, ordered by `key`, then by rank. The
    /// new group has counters of its own. Every rank of this group must call it. A rank splits one group at a time, in the same
    /// order as the others.
    ///
    /// # Errors
    /// A color or key beyond `i64`; else as for every operation: see [`Pending::wait`](crate::Pending::wait).
    #[track_caller]
    pub fn split(&self, color: usize, key: usize) -> Result<Self> {
        let own = self.comm.subgroup_number();
        let (ranks, numbers) = match self.is_single() {
            true => (vec![0], vec![own]),
            false => self.ranks_of_color(color, key, own)?,
        };
        let comm = self.comm.subgroup(&ranks, &numbers)?;
        let members: Arc<[usize]> = ranks.iter().map(|rank| self.members[*rank]).collect();
        // All ranks have called as much here.
        let seq = self.next_seq.load(Ordering::Relaxed);
        let watch = self.watch.as_ref();
        Ok(Self {
            axis: self.axis,
            watch: watch.map(|watch| Arc::new(watch.subgroup(&members, seq))),
            members,
            ..Self::new(comm)
        })
    }

    /// The ranks of this group that say the same color, in the order of their keys, and their
    /// [numbers](Communicator::subgroup_number), of which this rank's is `own`.
    #[track_caller]
    fn ranks_of_color(&self, color: usize, key: usize, own: i64) -> Result<(Vec<usize>, Vec<i64>)> {
        let number = |number: usize| {
            let too_large = || format!("split: {number} is too large a color or key");
            i64::try_from(number).map_err(|_| argument(too_large()))
        };
        let mine = Tensor::new(&[[number(color)?, number(key)?, own]], self.device())?;
        let all = self.start_as("split", &Operation::Split, &[mine], None)?;
        let all = one(all.wait()?)?.flatten_all()?.to_vec1::<i64>()?;
        self.comm.check()?;
        // Of each rank its color, key and number.
        let of = |rank: usize| &all[3 * rank..3 * rank + 3];
        let mut ranks: Vec<usize> = (0..self.world_size())
            .filter(|rank| of(*rank)[0] == of(self.rank())[0])
            .collect();
        ranks.sort_by_key(|rank| of(*rank)[1]);
        let numbers = ranks.iter().map(|rank| of(*rank)[2]).collect();
        Ok((ranks, numbers))
    }

    /// Notes which training step this rank is at, from 0, and what it does there. If the rank dies or hangs, the other ranks'
    /// messages say so, counting from 1, and so does a [trace], from 0.
    pub fn set_step(&self, step: usize, phase: &str) {
        trace::set_step(step);
        if let Some(watch) = &self.watch {
            watch.control.set_step(step as u64 + 1, phase);
        }
    }

    /// Notes what this rank does in the step that it is at.
    pub fn set_phase(&self, phase: impl FnOnce() -> String) {
        if let Some(watch) = &self.watch {
            watch.control.set_phase(phase());
        }
    }

    /// An error if the group has failed. On GPUs failures come late, and leave results unwritten: ask it after values that came
    /// from other ranks have been read on the host, before they are believed.
    ///
    /// # Errors
    /// The failure of the group.
    pub fn check(&self) -> Result<()> {
        self.comm.check()
    }

    fn is_single(&self) -> bool {
        self.world_size() == 1
    }

    fn lock_counters(&self) -> MutexGuard<'_, Counters> {
        self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that this rank sends if the operation moves as in a ring; see [`Counters`].
    fn ring_bytes(&self, operation: &Operation, xs: &[Tensor]) -> u64 {
        let n = self.world_size() as u128;
        let bytes_of = |xs: &Tensor| {
            let bytes_per_value = match operation.reduce_op() {
                Some(op) => self.comm.bytes_per_reduced_value(op, xs.dtype()),
                None => xs.dtype().size_in_bytes(),
            };
            (xs.elem_count() * bytes_per_value) as u128
        };
        let size: u128 = xs.iter().map(bytes_of).sum();
        let bytes = match operation {
            Operation::Messages { .. } => size,
            Operation::AllReduce(_) => 2 * (n - 1) * size / n,
            Operation::AllGather | Operation::Split => (n - 1) * size,
            Operation::Gather { root, .. } if *root == self.rank() => 0,
            Operation::Gather { .. } => size,
            Operation::Scatter { root, sizes } if *root == self.rank() => {
                let own = sizes[*root] as u128;
                let all: usize = sizes.iter().sum();
                size - size * own / (all as u128).max(1)
            }
            _ => (n - 1) * size / n,
        };
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }

    /// Counts an operation, and starts it.
    #[track_caller]
    fn start(
        &self,
        operation: &Operation,
        xs: &[Tensor],
        place: Option<&Tensor>,
    ) -> Result<Pending<Vec<Tensor>>> {
        let (name, bytes) = (operation.name(), self.ring_bytes(operation, xs));
        self.lock_counters().add(name, bytes);
        self.start_as(name, operation, xs, place)
    }

    /// Starts an operation, which is not counted, and which a trace calls `name`.
    #[track_caller]
    fn start_as(
        &self,
        name: &'static str,
        operation: &Operation,
        xs: &[Tensor],
        place: Option<&Tensor>,
    ) -> Result<Pending<Vec<Tensor>>> {
        for xs in xs {
            element::check(xs, self.members[self.rank()], self.device())?;
        }
        let seq = match operation {
            Operation::Messages { .. } => None,
            _ => Some(self.next_seq.fetch_add(1, Ordering::Relaxed)),
        };
        let mut request = Request::new(operation, xs, place, (&self.members, seq));
        let pending = match &self.watch {
            None => self.comm.start(&mut request)?,
            Some(watch) => watch.start(&*self.comm, &mut request)?,
        };
        Ok(pending.traced(|| {
            let op = OpSpan {
                operation: name,
                group: self.axis,
                num_ranks: self.world_size(),
                bytes: self.ring_bytes(operation, xs),
            };
            (op, self.device().clone())
        }))
    }

    /// Starts an operation that gives one tensor, in `place` if that is given; a group of one gives its input.
    #[track_caller]
    fn start_one(
        &self,
        operation: Operation,
        xs: &Tensor,
        place: Option<Tensor>,
    ) -> Result<Pending<Tensor>> {
        element::check_reduces(&operation, xs.dtype(), self.device())?;
        let has_no_elements = |place: &Tensor| place.elem_count() == 0;
        if self.is_single() || place.as_ref().is_some_and(has_no_elements) {
            return Ok(Pending::ready(place.unwrap_or_else(|| xs.detach())));
        }
        let xs = dims::contiguous(xs)?;
        Ok(self.start(&operation, &[xs], place.as_ref())?.map(one))
    }

    /// An error unless `rank` is in the group.
    fn check_rank(&self, operation: &str, role: &str, rank: usize) -> Result<()> {
        if rank < self.world_size() {
            return Ok(());
        }
        let world_size = self.world_size();
        Err(argument(format!(
            "{operation}: {role} {rank} is not a rank of a group of world_size {world_size}"
        )))
    }
}

/// The result of an operation that gives one tensor.
fn one(results: Vec<Tensor>) -> Result<Tensor> {
    let [result] = <[Tensor; 1]>::try_from(results).map_err(|results| {
        let num_results = results.len();
        Error::Backend(format!(
            "an operation gave {num_results} tensors, expected 1"
        ))
    })?;
    Ok(result)
}
