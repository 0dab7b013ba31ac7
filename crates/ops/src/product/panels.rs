//! All panels of a right matrix, kept for many products.

use super::kernel::{COLS, Kernel, ROW_LINES};
use super::matrix::{Matrix, PARALLEL_MULTIPLICATIONS};
use super::packing::{Format, Layout, Panel};
use super::sum::{Sum, sums};
use crate::cpu::element::Element;
use crate::cpu::lines::Line;
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
        Self {
            lines: zeros(Self::num_lines::<K>(num_k, cols)),
            num_k,
            cols,
            kernel: TypeId::of::<K>(),
        }
    }

    /// Whether these are for this kernel and a matrix (k, cols).
    pub(super) fn fit<K: Kernel>(&self, num_k: usize, cols: usize) -> bool {
        self.kernel == TypeId::of::<K>() && (self.num_k, self.cols) == (num_k, cols)
    }

    /// Makes these panels, which then hold nothing, those for this kernel and a matrix (k, cols), if there is room for them; returns whether there is.
    pub(super) fn reuse<K: Kernel>(&mut self, num_k: usize, cols: usize) -> bool {
        let has_room = Self::num_lines::<K>(num_k, cols) <= self.lines.len();
        if has_room {
            (self.num_k, self.cols) = (num_k, cols);
            self.kernel = TypeId::of::<K>();
        }
        has_room
    }

    /// Packs a matrix that these are for.
    ///
    /// # Safety
    /// The processor has what the kernel needs.
    pub(super) unsafe fn pack<K: Kernel, T: Element>(&mut self, matrix: Matrix<'_, T>) {
        assert!(self.fit::<K>(matrix.rows, matrix.cols));
        let num_panels = self.cols.div_ceil(COLS);
        let is_parallel = self.num_k * self.cols * COLS > PARALLEL_MULTIPLICATIONS;
        let mut lines = &mut *self.lines;
        for sum in sums_of::<K>(self.num_k) {
            let layout = Layout::new::<K::Format>(sum.lanes, COLS, false);
            let (of_sum, rest) = lines.split_at_mut(num_panels * layout.stride);
            lines = rest;
            let pack = |(task, lines): (usize, &mut [Line])| {
                let start = task * PANELS_OF_TASK * COLS;
                let cols = start..matrix.cols.min(start + PANELS_OF_TASK * COLS);
                // SAFETY: as promised by the caller.
                unsafe { K::Format::pack(matrix.t(), cols, sum.k.clone(), layout, lines) };
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
        let layout = Layout::new::<K::Format>(sum.lanes, COLS, false);
        // All sums but the last are of whole lanes.
        let before = sum.k.start / K::Format::TERMS * lane_lines::<K>();
        let first = self.cols.div_ceil(COLS) * before + col / COLS * layout.stride;
        layout.lanes_of(&self.lines[first..], 0, sum.lanes)
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
