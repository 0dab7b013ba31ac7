//! Collectives. Those that are started return at once, with a result that comes from `Pending::wait`, and act on dim 0; those that
//! block act along any dim.

use candle_core::shape::Dim;
use candle_core::{DType, Result, Tensor};

use super::{ProcessGroup, dims, one};
use crate::device::empty;
use crate::{Operation, Pending, ReduceOp};

/// What counters and traces call the exchange of byte strings.
const GATHER_BYTES: &str = "all_gather_bytes";

impl ProcessGroup {
    /// `(..) -> (..)`: the elementwise reduction over the ranks, on every rank.
    ///
    /// # Errors
    /// This and every blocking form fail as their started form and [`Pending::wait`](crate::Pending::wait) do.
    #[track_caller]
    pub fn all_reduce(&self, xs: &Tensor, op: ReduceOp) -> Result<Tensor> {
        self.start_all_reduce(xs, op)?.wait()
    }

    /// `(.., n, ..) -> (.., world_size * n, ..)`: the ranks' tensors one after the other along `dim`, on every rank.
    ///
    /// # Errors
    /// A dim that the tensor does not have; else as [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn all_gather(&self, xs: &Tensor, dim: impl Dim) -> Result<Tensor> {
        let dim = dim.to_index(xs.shape(), "all_gather")?;
        let gathered = self.start_all_gather(xs)?.wait()?;
        dims::rearrange(&gathered, (0, dim), self.world_size())
    }

    /// `(.., world_size * n, ..) -> (.., n, ..)`: this rank's part, along `dim`, of the elementwise reduction.
    ///
    /// # Errors
    /// A dim whose size the group does not divide; else as [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn reduce_scatter(&self, xs: &Tensor, op: ReduceOp, dim: impl Dim) -> Result<Tensor> {
        let xs = self.split_to_front("reduce_scatter", xs, dim)?.0;
        self.start_reduce_scatter(&xs, op)?.wait()
    }

    /// `(..) -> (..)`: root's tensor on every rank. `xs` has the same shape and dtype on all ranks; its values matter
    /// on the root only.
    ///
    /// # Errors
    /// A root outside the group; else as [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn broadcast(&self, xs: &Tensor, root: usize) -> Result<Tensor> {
        self.start_broadcast(xs, root)?.wait()
    }

    /// `(.., world_size * n, ..) -> (.., world_size * n, ..)`: part `j` along `dim` goes to rank `j`; what came from
    /// rank `i` is part `i` of the result.
    ///
    /// # Errors
    /// A dim whose size the group does not divide; else as [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn all_to_all(&self, xs: &Tensor, dim: impl Dim) -> Result<Tensor> {
        let (xs, dim) = self.split_to_front("all_to_all", xs, dim)?;
        let ys = self.start_all_to_all(&xs)?.wait()?;
        dims::rearrange(&ys, (0, dim), self.world_size())
    }

    /// The ranks' parts along `dim` one after the other, and which dim that is.
    fn split_to_front(
        &self,
        operation: &'static str,
        xs: &Tensor,
        dim: impl Dim,
    ) -> Result<(Tensor, usize)> {
        let dim = dim.to_index(xs.shape(), operation)?;
        dims::check_divides(operation, xs, dim, self.world_size())?;
        Ok((dims::rearrange(xs, (dim, 0), self.world_size())?, dim))
    }

    /// Returns once every rank of the group has called it.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.start_barrier()?.wait()
    }

    /// Starts an [`all_reduce`](Self::all_reduce). `xs` must not be written to before the wait.
    ///
    /// # Errors
    /// Wrong arguments and ranks known to have failed; everything else comes from the wait.
    #[track_caller]
    pub fn start_all_reduce(&self, xs: &Tensor, op: ReduceOp) -> Result<Pending<Tensor>> {
        self.start_one(Operation::AllReduce(op), xs, None)
    }

    /// Starts an [`all_gather`](Self::all_gather) along dim 0. `xs` must not be written to before the wait.
    ///
    /// # Errors
    /// A tensor without dims; else as [`start_all_reduce`](Self::start_all_reduce).
    #[track_caller]
    pub fn start_all_gather(&self, xs: &Tensor) -> Result<Pending<Tensor>> {
        dims::check_dim("all_gather", xs, 0)?;
        self.start_one(Operation::AllGather, xs, None)
    }

    /// Starts a [`reduce_scatter`](Self::reduce_scatter) along dim 0. `xs` must not be written to before the wait.
    ///
    /// # Errors
    /// A dim 0 that the group does not divide; else as [`start_all_reduce`](Self::start_all_reduce).
    #[track_caller]
    pub fn start_reduce_scatter(&self, xs: &Tensor, op: ReduceOp) -> Result<Pending<Tensor>> {
        dims::check_divides("reduce_scatter", xs, 0, self.world_size())?;
        self.start_one(Operation::ReduceScatter(op), xs, None)
    }

    /// Starts a [`broadcast`](Self::broadcast). `xs` must not be written to before the wait.
    ///
    /// # Errors
    /// A root outside the group; else as [`start_all_reduce`](Self::start_all_reduce).
    #[track_caller]
    pub fn start_broadcast(&self, xs: &Tensor, root: usize) -> Result<Pending<Tensor>> {
        self.check_rank("broadcast", "root", root)?;
        self.start_one(Operation::Broadcast { root }, xs, None)
    }

    /// Starts an [`all_to_all`](Self::all_to_all) along dim 0. `xs` must not be written to before the wait.
    ///
    /// # Errors
    /// A dim 0 that the group does not divide; else as [`start_all_reduce`](Self::start_all_reduce).
    #[track_caller]
    pub fn start_all_to_all(&self, xs: &Tensor) -> Result<Pending<Tensor>> {
        dims::check_divides("all_to_all", xs, 0, self.world_size())?;
        self.start_one(Operation::AllToAll, xs, None)
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
            .start(&Operation::Barrier, &[nothing], None)?
            .map(|_| Ok(())))
    }

    /// One byte string per rank, in rank order, of any lengths: for catalogs and errors rather than for tensors.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let all = self.exchange(bytes)?;
        if !self.is_single() {
            let longest = all.iter().map(Vec::len).max().unwrap_or(0);
            let moved = (self.world_size() - 1) * (longest + size_of::<i64>());
            self.lock_counters().add(GATHER_BYTES, moved as u64);
        }
        Ok(all)
    }

    /// [`all_gather_bytes`](Self::all_gather_bytes) without counting: lengths first, then the strings padded to the
    /// longest one.
    #[track_caller]
    pub(crate) fn exchange(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        if self.is_single() {
            return Ok(vec![bytes.to_vec()]);
        }
        let length = Tensor::new(&[bytes.len() as i64], self.device())?;
        let lengths = self.gather_uncounted(length)?.to_vec1::<i64>()?;
        self.comm.check()?;
        let longest = lengths.iter().max().map_or(0, |longest| *longest as usize);
        if longest == 0 {
            return Ok(vec![Vec::new(); self.world_size()]);
        }
        let mut padded = bytes.to_vec();
        padded.resize(longest, 0);
        let padded = Tensor::from_vec(padded, longest, self.device())?;
        let all = self.gather_uncounted(padded)?.to_vec1::<u8>()?;
        self.comm.check()?;
        let strings = all.chunks(longest).zip(&lengths);
        let strings = strings.map(|(chunk, length)| chunk[..*length as usize].to_vec());
        Ok(strings.collect())
    }

    /// `(n) -> (world_size * n)`
    #[track_caller]
    fn gather_uncounted(&self, xs: Tensor) -> Result<Tensor> {
        one(self
            .start_as(GATHER_BYTES, &Operation::AllGather, &[xs], None)?
            .wait()?)
    }
}
