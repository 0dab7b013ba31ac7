//! All panels of a right matrix, kept for many products.

use super::blocks::{Sum, sums};
use super::kernel::{COLS, Kernel, ROW_LINES};
use super::packing::{Format, Layout, Panel};
use crate::element::Element;
use crate::lines::{LANES, Line};
use crate::matrix::{Matrix, PARALLEL_MULTIPLICATIONS};
use crate::panel_rows::PanelSource;
use rayon::prelude::*;
use std::alloc::{alloc_zeroed, handle_alloc_error};
use std::any::TypeId;

/// Panels that a task packs: their columns are read together.
const PANELS_OF_TASK: usize = 8;

/// The panels of a matrix (k, cols), sum after sum.
pub(crate) struct Panels {
    lines: Vec<Line>,
    num_k: usize,
    cols: usize,
    /// The kernel that reads them.
    kernel: TypeId,
    sums: Vec<Sum>,
    /// Values of a lane.
    terms: usize,
    /// Lines for each lane along `k`, of all parts.
    lane_lines: usize,
}

impl std::fmt::Debug for Panels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "panels of a matrix ({}, {})", self.num_k, self.cols)
    }
}

/// Lines of a panel for each lane along `k`, of all parts.
const fn lane_lines<K: Kernel>() -> usize {
    ROW_LINES * K::Format::PARTS
}

/// The sums of a product with so many values along `k`.
fn sums_of<K: Kernel>(num_k: usize) -> Vec<Sum> {
    sums::<K>(&[num_k], usize::MAX)
}

impl Panels {
    /// Lines of the panels of a matrix (k, cols).
    pub(super) fn num_lines<K: Kernel>(num_k: usize, cols: usize) -> usize {
        let lanes: usize = sums_of::<K>(num_k).iter().map(|sum| sum.lanes).sum();
        cols.div_ceil(COLS) * lanes * lane_lines::<K>()
    }

    /// Memory for the panels of a matrix (k, cols), of which none is written.
    pub(super) fn new<K: Kernel>(num_k: usize, cols: usize) -> Self {
        Self::of_lines::<K>(zeros(Self::num_lines::<K>(num_k, cols)), num_k, cols)
    }

    fn of_lines<K: Kernel>(lines: Vec<Line>, num_k: usize, cols: usize) -> Self {
        Self {
            lines,
            num_k,
            cols,
            kernel: TypeId::of::<K>(),
            sums: sums_of::<K>(num_k),
            terms: K::Format::TERMS,
            lane_lines: lane_lines::<K>(),
        }
    }

    /// Whether these are for this kernel and a matrix (k, cols).
    pub(super) fn fit<K: Kernel>(&self, num_k: usize, cols: usize) -> bool {
        self.kernel == TypeId::of::<K>() && (self.num_k, self.cols) == (num_k, cols)
    }

    /// Panels for this kernel and a matrix (k, cols) in the memory of these, if there is room.
    pub(super) fn reuse<K: Kernel>(self, num_k: usize, cols: usize) -> Option<Self> {
        let has_room = Self::num_lines::<K>(num_k, cols) <= self.lines.len();
        has_room.then(|| Self::of_lines::<K>(self.lines, num_k, cols))
    }

    /// Where they begin.
    #[cfg(test)]
    pub(super) fn place(&self) -> *const Line {
        self.lines.as_ptr()
    }

    /// Packs a matrix that these are for.
    ///
    /// # Safety
    /// The processor has what the kernel needs.
    pub(super) unsafe fn pack<K: Kernel, T: Element>(&mut self, source: &PanelSource<'_, T>) {
        let (num_k, num_cols) = source.dims();
        assert!(self.fit::<K>(num_k, num_cols));
        let num_panels = self.cols.div_ceil(COLS);
        let is_parallel = self.num_k * self.cols * COLS > PARALLEL_MULTIPLICATIONS;
        let mut lines = &mut *self.lines;
        for sum in &self.sums {
            let layout = layout::<K>(sum);
            let (of_sum, rest) = lines.split_at_mut(num_panels * layout.stride);
            lines = rest;
            let values;
            let (matrix, k) = match source {
                PanelSource::Matrix(matrix) => (*matrix, sum.k.clone()),
                PanelSource::Rows(rows) => {
                    // Only those of one sum are in memory.
                    let first = sum.k.start / LANES * LANES;
                    values = rows.values::<T>(first..sum.k.end);
                    let matrix = Matrix::new(&values, sum.k.end - first, num_cols, num_cols);
                    (matrix, sum.k.start - first..sum.k.end - first)
                }
            };
            let pack = |(task, lines): (usize, &mut [Line])| {
                let start = task * PANELS_OF_TASK * COLS;
                let cols = start..num_cols.min(start + PANELS_OF_TASK * COLS);
                // SAFETY: as promised by the caller.
                unsafe { K::Format::pack(matrix.t(), cols, k.clone(), layout, lines) };
            };
            let len = PANELS_OF_TASK * layout.stride;
            match is_parallel {
                true => of_sum.par_chunks_mut(len).enumerate().for_each(pack),
                false => of_sum.chunks_mut(len).enumerate().for_each(pack),
            }
        }
    }

    /// The panel of columns from `col` on, a multiple of [`COLS`], of a sum of the kernel that these are for.
    pub(super) fn panel<K: Kernel>(&self, sum: &Sum, col: usize) -> Panel<'_> {
        let lines = &self.lines[self.first_line(sum, col)..];
        layout::<K>(sum).lanes_of(lines, 0, sum.lanes)
    }

    /// Where the panel of the column `col` begins, of a sum.
    fn first_line(&self, sum: &Sum, col: usize) -> usize {
        // All sums but the last are of whole lanes.
        let before = sum.k.start / self.terms;
        let num_lanes = self.cols.div_ceil(COLS) * before + col / COLS * sum.lanes;
        num_lanes * self.lane_lines
    }

    /// Whether a lane holds two bf16, and not one f32.
    pub(crate) fn has_pairs(&self) -> bool {
        self.terms > 1
    }

    /// The sum that has the value at `place` along `k`: all but the last are as long as the first.
    fn sum_at(&self, place: usize) -> &Sum {
        &self.sums[place / self.sums[0].k.len()]
    }

    /// Values along `k` from `place` on, where a lane begins, that follow each other in lanes; the last ones are zeros if these are more than there are values.
    pub(crate) fn values_left(&self, place: usize) -> usize {
        let sum = self.sum_at(place);
        sum.lanes * self.terms - (place - sum.k.start)
    }

    /// The lanes of 16 columns from `col` on, a multiple of 16, of `len` values from `start` on, of [as many](Self::values_left) at most: a line for each lane, and
    /// one between each two that belongs to other columns. Of panels that have one part of each value.
    pub(crate) fn lanes(&self, col: usize, start: usize, len: usize) -> &[Line] {
        let is_aligned = col.is_multiple_of(LANES) && start.is_multiple_of(self.terms);
        let has_values = (1..=self.values_left(start)).contains(&len);
        assert!(self.lane_lines == ROW_LINES && is_aligned && has_values);
        let sum = self.sum_at(start);
        let lane = (start - sum.k.start) / self.terms;
        let first = self.first_line(sum, col) + lane * ROW_LINES + col % COLS / LANES;
        let num_lines = (len.div_ceil(self.terms) - 1) * ROW_LINES + 1;
        &self.lines[first..first + num_lines]
    }
}

fn layout<K: Kernel>(sum: &Sum) -> Layout {
    Layout {
        width: COLS,
        by_vectors: false,
        lanes: sum.lanes,
        stride: sum.lanes * lane_lines::<K>(),
    }
}

/// Zeros, of which the system gives each page when it is first used.
fn zeros(len: usize) -> Vec<Line> {
    let layout = std::alloc::Layout::array::<Line>(len);
    let Some(layout) = layout.ok().filter(|layout| layout.size() > 0) else {
        return vec![Line::ZERO; len]; // none, or more than there can be, which this says
    };
    // SAFETY: the layout is not empty.
    let place = unsafe { alloc_zeroed(layout) };
    if place.is_null() {
        handle_alloc_error(layout)
    }
    // SAFETY: allocated as a vector of so many lines is, whose bits may all be 0.
    unsafe { Vec::from_raw_parts(place.cast(), len, len) }
}
