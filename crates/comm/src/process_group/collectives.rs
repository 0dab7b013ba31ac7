//! Collectives. Those that are started return at once, with a result that comes from `Pending::wait`, and act on dim 0; those that
//! block act along any dim.

use candle_core::shape::Dim;
use candle_core::{DType, Result, Tensor};

use super::{ProcessGroup, dims, one};
use crate::error::argument;
use crate::memory::device::empty;
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

    /// `(..) -> (..)`: the elementwise reduction over the ranks on the root, nothing on the others. In torch the root is `dst`.
    ///
    /// # Errors
    /// A root outside the group; else as [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn reduce(&self, xs: &Tensor, root: usize, op: ReduceOp) -> Result<Option<Tensor>> {
        self.start_reduce(xs, root, op)?.wait()
    }

    /// `(.., sizes[0] + sizes[1] + .., ..) -> (.., sizes[rank], ..)`: the root's tensor, dealt out along `dim`. All ranks say the same root
    /// and sizes, which may differ from each other and be 0. On the others only the dtype and the other dims of `xs` matter: it may have
    /// size 0 along `dim`. In torch the root is `src`.
    ///
    /// # Errors
    /// A root outside the group, sizes that are not one for each rank or on the root do not add up to the tensor's, and a dim that it does
    /// not have; else as [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn scatter(
        &self,
        xs: &Tensor,
        sizes: &[usize],
        root: usize,
        dim: impl Dim,
    ) -> Result<Tensor> {
        let dim = dim.to_index(xs.shape(), "scatter")?;
        let part = self.start_scatter(&xs.transpose(0, dim)?, sizes, root)?;
        dims::contiguous(&part.wait()?.transpose(0, dim)?)
    }

    /// `(.., sizes[rank], ..) -> (.., sizes[0] + sizes[1] + .., ..)`: the ranks' tensors one after the other along `dim` on the root, nothing
    /// on the others. All ranks say the same root and sizes, which may differ from each other and be 0. In torch the root is `dst`.
    ///
    /// # Errors
    /// A root outside the group, sizes that are not one for each rank, a tensor of another size than this rank's, and a dim that it does not
    /// have; else as [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn gather(
        &self,
        xs: &Tensor,
        sizes: &[usize],
        root: usize,
        dim: impl Dim,
    ) -> Result<Option<Tensor>> {
        let dim = dim.to_index(xs.shape(), "gather")?;
        let all = self.start_gather(&xs.transpose(0, dim)?, sizes, root)?;
        let all = all.wait()?;
        all.map(|all| dims::contiguous(&all.transpose(0, dim)?))
            .transpose()
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

    /// Starts a [`reduce`](Self::reduce). `xs` must not be written to before the wait.
    ///
    /// # Errors
    /// A root outside the group; else as [`start_all_reduce`](Self::start_all_reduce).
    #[track_caller]
    pub fn start_reduce(
        &self,
        xs: &Tensor,
        root: usize,
        op: ReduceOp,
    ) -> Result<Pending<Option<Tensor>>> {
        self.check_rank("reduce", "root", root)?;
        let pending = self.start_one(Operation::Reduce { op, root }, xs, None)?;
        Ok(self.on_root(root, pending))
    }

    /// Starts a [`scatter`](Self::scatter) along dim 0. `xs` must not be written to before the wait.
    ///
    /// # Errors
    /// As [`scatter`](Self::scatter) of arguments; else as [`start_all_reduce`](Self::start_all_reduce).
    #[track_caller]
    pub fn start_scatter(
        &self,
        xs: &Tensor,
        sizes: &[usize],
        root: usize,
    ) -> Result<Pending<Tensor>> {
        let expected = (self.rank() == root).then(|| sizes.iter().sum());
        self.check_rows("scatter", xs, (sizes, root), expected)?;
        let sizes = sizes.into();
        // What others have is not sent.
        let num_rows = if self.rank() == root { xs.dim(0)? } else { 0 };
        let xs = xs.narrow(0, 0, num_rows)?;
        self.start_one(Operation::Scatter { root, sizes }, &xs, None)
    }

    /// Starts a [`gather`](Self::gather) along dim 0. `xs` must not be written to before the wait.
    ///
    /// # Errors
    /// As [`gather`](Self::gather) of arguments; else as [`start_all_reduce`](Self::start_all_reduce).
    #[track_caller]
    pub fn start_gather(
        &self,
        xs: &Tensor,
        sizes: &[usize],
        root: usize,
    ) -> Result<Pending<Option<Tensor>>> {
        let expected = sizes.get(self.rank()).copied();
        self.check_rows("gather", xs, (sizes, root), expected)?;
        let sizes = sizes.into();
        let pending = self.start_one(Operation::Gather { root, sizes }, xs, None)?;
        Ok(self.on_root(root, pending))
    }

    /// What an operation gives, on the root.
    fn on_root(&self, root: usize, pending: Pending<Tensor>) -> Pending<Option<Tensor>> {
        let is_root = self.rank() == root;
        pending.map(move |result| Ok(is_root.then_some(result)))
    }

    /// An error unless there is a size for each rank, and dim 0 of `xs` is `expected`, if that is given.
    fn check_rows(
        &self,
        name: &str,
        xs: &Tensor,
        (sizes, root): (&[usize], usize),
        expected: Option<usize>,
    ) -> Result<()> {
        self.check_rank(name, "root", root)?;
        dims::check_dim(name, xs, 0)?;
        let (rank, n, num_rows) = (self.rank(), self.world_size(), xs.dims()[0]);
        let message = match expected {
            _ if sizes.len() != n => {
                format!("expected a size for each of {n} ranks, got {}", sizes.len())
            }
            Some(expected) if expected != num_rows => {
                format!("expected {expected} rows on rank {rank}, got {num_rows}")
            }
            _ => return Ok(()),
        };
        Err(argument(format!(
            "{name}(root {root}, sizes {sizes:?}): {message}"
        )))
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
