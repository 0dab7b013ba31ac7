//! Blocking forms, along any dim.

use candle_core::shape::Dim;
use candle_core::{Result, Tensor};

use super::{ProcessGroup, dims, one};
use crate::{Error, Operation, ReduceOp};

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
        if dim == 0 || self.is_single() {
            return Ok(gathered);
        }
        dims::front_to_dim(&gathered, dim, self.world_size())
    }

    /// `(.., world_size * n, ..) -> (.., n, ..)`: this rank's part, along `dim`, of the elementwise reduction.
    ///
    /// # Errors
    /// A dim whose size the group does not divide; else as [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn reduce_scatter(&self, xs: &Tensor, op: ReduceOp, dim: impl Dim) -> Result<Tensor> {
        let dim = dim.to_index(xs.shape(), "reduce_scatter")?;
        dims::check_divides("reduce_scatter", xs, dim, self.world_size())?;
        if dim == 0 || self.is_single() {
            return self.start_reduce_scatter(xs, op)?.wait();
        }
        self.start_reduce_scatter(&dims::split_to_front(xs, dim, self.world_size())?, op)?
            .wait()
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
        let dim = dim.to_index(xs.shape(), "all_to_all")?;
        dims::check_divides("all_to_all", xs, dim, self.world_size())?;
        if dim == 0 || self.is_single() {
            return self.start_all_to_all(xs)?.wait();
        }
        let ys = self
            .start_all_to_all(&dims::split_to_front(xs, dim, self.world_size())?)?
            .wait()?;
        dims::front_to_dim(&ys, dim, self.world_size())
    }

    /// Returns once every rank of the group has called it.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.start_barrier()?.wait()
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
        crate::call_site::scope(std::panic::Location::caller(), || {
            let length = Tensor::new(&[bytes.len() as i64], self.device())?;
            let lengths = self.gather_traced(length)?.to_vec1::<i64>()?;
            self.comm.check()?;
            let longest = lengths.iter().max().map_or(0, |longest| *longest as usize);
            if longest == 0 {
                return Ok(vec![Vec::new(); self.world_size()]);
            }
            let mut padded = bytes.to_vec();
            padded.resize(longest, 0);
            let padded = Tensor::from_vec(padded, longest, self.device())?;
            let all = self.gather_traced(padded)?.to_vec1::<u8>()?;
            self.comm.check()?;
            if all.len() != longest * lengths.len() {
                return Err(Error::Argument(format!(
                    "gathered {} bytes, expected {}",
                    all.len(),
                    longest * lengths.len()
                ))
                .into());
            }
            Ok(all
                .chunks(longest)
                .zip(&lengths)
                .map(|(chunk, length)| chunk[..*length as usize].to_vec())
                .collect())
        })
    }

    /// `(n) -> (world_size * n)`, without counting.
    fn gather_traced(&self, xs: Tensor) -> Result<Tensor> {
        let (operation, xs) = (Operation::AllGather, [xs]);
        let pending = self.comm.start(&operation, &xs, None)?;
        let bytes = self.ring_bytes(&operation, &xs);
        one(pending.traced(|| self.traced(GATHER_BYTES, bytes)).wait()?)
    }
}
