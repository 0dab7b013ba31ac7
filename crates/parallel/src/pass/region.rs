//! The border between what tensor-parallel ranks have alike and the region in which each computes with its part of the weights.

use std::ops::Range;

use candle_comm::ProcessGroup;

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
    pub(crate) fn longest(&self, num_rows: usize) -> usize {
        num_rows.div_ceil(self.tp.world_size())
    }

    /// Dims of what this rank has outside of (b, t, ..).
    pub fn dims_outside(&self, b: usize, t: usize) -> (usize, usize) {
        match self.divides_rows {
            true => (1, self.own_rows(b * t).len()),
            false => (b, t),
        }
    }
}
