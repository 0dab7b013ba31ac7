//! The border between what tensor-parallel ranks have alike and the region in which each computes with its part of the weights.

use std::ops::Range;

use candle_comm::{Pending, ProcessGroup, ReduceOp};
use candle_core::{D, Result, Tensor, bail};

use crate::pass::Pass;
use crate::placement::Gradient;

/// The ranks of a tensor-parallel region, and what they have outside of it: all rows each, or with sequence parallelism (arXiv:2205.05198) each its part
/// of the rows.
///
/// | | without | with sequence parallelism |
/// |---|---|---|
/// | outside | (b, t, ..) on every rank | (1, own rows, ..): the rows of all sequences one after the other, in parts as long as can be but for the last ones |
/// | entering | nothing | all-gather |
/// | leaving | all-reduce | reduce-scatter |
/// | gradients of weights that are used outside | [`Gradient::Complete`] | [`Gradient::Partial`] |
///
/// [`ParamBuilder::outside`](crate::ParamBuilder::outside) asks for weights that are used outside. Numbers of rows that the ranks do not divide
/// are padded with zeros on their way.
#[derive(Clone, Debug)]
pub struct Region {
    tp: ProcessGroup,
    divides_rows: bool,
}

impl From<&ProcessGroup> for Region {
    /// Every rank has all rows outside.
    fn from(tp: &ProcessGroup) -> Self {
        Self {
            tp: tp.clone(),
            divides_rows: false,
        }
    }
}

impl From<&Region> for Region {
    fn from(region: &Region) -> Self {
        region.clone()
    }
}

impl From<ProcessGroup> for Region {
    /// Every rank has all rows outside.
    fn from(tp: ProcessGroup) -> Self {
        Self::from(&tp)
    }
}

impl Region {
    /// Each rank has a part of the rows outside; one rank alone has all.
    pub fn sequence_parallel(tp: &ProcessGroup) -> Self {
        Self {
            tp: tp.clone(),
            divides_rows: tp.world_size() > 1,
        }
    }

    /// The ranks.
    pub fn tp(&self) -> &ProcessGroup {
        &self.tp
    }

    /// Whether each rank has a part of the rows outside.
    pub fn divides_rows(&self) -> bool {
        self.divides_rows
    }

    /// What a rank has of the gradient of a weight that it uses outside, on its rows.
    pub fn outside(&self) -> Gradient {
        match self.divides_rows {
            true => Gradient::Partial,
            false => Gradient::Complete,
        }
    }

    /// The rows that this rank has outside, of `num_rows`.
    pub fn own_rows(&self, num_rows: usize) -> Range<usize> {
        if !self.divides_rows {
            return 0..num_rows;
        }
        let len = self.longest(num_rows);
        let bound = |rank: usize| (rank * len).min(num_rows);
        bound(self.tp.rank())..bound(self.tp.rank() + 1)
    }

    /// Bytes that a rank has outside for each row of a pass, of so many that all ranks have of it.
    pub fn bytes_outside(&self, bytes: usize) -> usize {
        match self.divides_rows {
            true => bytes.div_ceil(self.tp.world_size()),
            false => bytes,
        }
    }

    /// Rows of the longest part.
    fn longest(&self, num_rows: usize) -> usize {
        num_rows.div_ceil(self.tp.world_size())
    }

    /// Dims of what this rank has outside of (b, t, ..).
    pub fn dims_outside(&self, b: usize, t: usize) -> (usize, usize) {
        match self.divides_rows {
            true => (1, self.own_rows(b * t).len()),
            false => (b, t),
        }
    }

    /// Enters the region: what this rank has outside as (b, t, ..), the same on all ranks.
    ///
    /// # Errors
    /// Rows that are not those of the pass, and what ends collectives.
    pub fn enter(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        self.start_enter(xs, pass)?.wait()
    }

    /// An error if `xs` cannot be what this rank has outside in this pass.
    pub(super) fn check_rows(&self, xs: &Tensor, pass: &Pass) -> Result<()> {
        if !self.divides_rows && !pass.divides_rows() {
            return Ok(());
        }
        let (b, t) = pass.dims()?;
        let own = Self::sequence_parallel(&self.tp).own_rows(b * t).len();
        let (_, rows) = xs.dims().split_last().unwrap_or((&1, &[]));
        if self.divides_rows && rows.iter().product::<usize>() != own {
            bail!(
                "a tensor of shape {:?} enters a region whose ranks have a part of the rows each outside; expected {own} rows, this rank's of {}",
                xs.shape(),
                b * t
            );
        }
        if !self.divides_rows && own != b * t && rows.starts_with(&[1, own]) {
            bail!(
                "a tensor of shape {:?} enters a region whose ranks have all {} rows each outside, in a model whose ranks have a part of them\nhint: \
                 every layer gets the region of ModelPart::with_region",
                xs.shape(),
                b * t
            );
        }
        Ok(())
    }

    /// Starts to [enter](Self::enter).
    ///
    /// # Errors
    /// As [`Self::enter`].
    pub fn start_enter(&self, xs: &Tensor, pass: &Pass) -> Result<Pending<Tensor>> {
        self.check_rows(xs, pass)?;
        if !self.divides_rows {
            return Ok(Pending::ready(xs.clone()));
        }
        let (b, t) = pass.dims()?;
        let num_rows = b * t;
        let own = xs.flatten_to(D::Minus2)?;
        let padded = padded(&own, self.longest(num_rows))?;
        let width = padded.dim(1)?;
        let all = self.tp.start_all_gather(&padded)?;
        Ok(all.map(move |all| {
            all.narrow(0, 0, num_rows)?
                .contiguous()?
                .reshape((b, t, width))
        }))
    }

    /// Leaves the region with this rank's summand (.., features) of all rows: the sum, as this rank has it outside.
    ///
    /// # Errors
    /// What ends collectives, such as another shape on another rank.
    pub fn leave(&self, partial: &Tensor) -> Result<Tensor> {
        self.start_leave(partial)?.wait()
    }

    /// Starts to [leave](Self::leave).
    ///
    /// # Errors
    /// As [`Self::leave`].
    pub fn start_leave(&self, partial: &Tensor) -> Result<Pending<Tensor>> {
        if !self.divides_rows {
            return self.tp.start_all_reduce(partial, ReduceOp::Sum);
        }
        let rows = partial.flatten_to(D::Minus2)?;
        let num_rows = rows.dim(0)?;
        let num_padded = self.longest(num_rows) * self.tp.world_size();
        let own = self.own_rows(num_rows).len();
        let sum = self
            .tp
            .start_reduce_scatter(&padded(&rows, num_padded)?, ReduceOp::Sum)?;
        Ok(sum.map(move |sum| sum.narrow(0, 0, own)?.contiguous()?.unsqueeze(0)))
    }
}

/// Rows, (rows, width), and zeros up to `len`.
fn padded(rows: &Tensor, len: usize) -> Result<Tensor> {
    let (num_rows, width) = rows.dims2()?;
    if num_rows == len {
        return rows.contiguous();
    }
    let zeros = Tensor::zeros((len - num_rows, width), rows.dtype(), rows.device())?;
    match num_rows {
        // candle's cat panics on tensors without elements.
        0 => Ok(zeros),
        _ => Tensor::cat(&[rows, &zeros], 0),
    }
}
