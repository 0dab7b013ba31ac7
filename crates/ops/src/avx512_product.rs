//! Products of large matrices with AVX-512: blocks that fit the caches, packed in the order in which they are read, and a
//! tile of 14 x 32 sums in registers (Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", ACM
//! TOMS 34, 2008).
//!
//! The `gemm` crate does all other products. This one exists for training steps: on their products it is as fast with sums of
//! 192 terms as that one with sums of any length, which round more (docs/accuracy.md), and packs a transposed weight faster.
//! The example `bench_product` of this crate prints the ratio.
//!
//! An element is summed over `k` in the same blocks, in order, whatever tile or thread it belongs to: the bits are the
//! same for any number of threads.

#![allow(unsafe_code)]

mod kernel;
mod packing;

use crate::matrix::{Matrix, MatrixMut, SUM_LEN};
use kernel::{PANEL_COLS, PANEL_ROWS, Tile, multiply_tile};
use packing::{LANES, Line, pack};
use rayon::prelude::*;
use std::cell::Cell;
use std::ops::Range;

/// Lines of the right matrix that are packed at a time: 2 MiB, of the last-level cache.
const RHS_LINES: usize = 1 << 15;
/// Most panels of the left matrix that a thread packs at a time: 192 KiB, of its second-level cache.
const LHS_PANELS: usize = 16;
/// Panels of the right matrix that are packed together: 1 KiB of each row of it.
const RHS_PANELS: usize = 8;
/// Lines of a panel of the right matrix for each `k`.
const LINES_PER_K: usize = PANEL_COLS / LANES;
/// With fewer rows or columns than this, tiles are mostly empty.
const MIN_EXTENT: usize = 2 * PANEL_ROWS;

thread_local! {
    /// Packed parts of the right and the left matrix, kept from product to product.
    static BUFFERS: [Cell<Vec<Line>>; 2] = const { [Cell::new(Vec::new()), Cell::new(Vec::new())] };
}

/// Whether [`product`] can be used, and should be, for a result of `rows` by `cols`.
pub(crate) fn is_worth_it(rows: usize, cols: usize) -> bool {
    rows >= MIN_EXTENT && cols >= MIN_EXTENT && is_x86_feature_detected!("avx512f")
}

/// `out = lhs * rhs`, or `out += lhs * rhs` if `add`, on all threads of the current pool.
///
/// # Safety
/// [`is_worth_it`], the shapes fit and `k` is not 0.
pub(crate) unsafe fn product(out: &mut MatrixMut<'_>, add: bool, lhs: Matrix<'_>, rhs: Matrix<'_>) {
    let num_k = lhs.cols;
    let sum_len = num_k.div_ceil(num_k.div_ceil(SUM_LEN));
    let panel_cols = out.cols.next_multiple_of(PANEL_COLS);
    let max_cols = RHS_LINES * LANES / sum_len / PANEL_COLS * PANEL_COLS;
    let block_cols = panel_cols.min(max_cols);
    let block_k = RHS_LINES * LANES / block_cols / sum_len * sum_len;
    let out = &*out;
    with_buffer(0, |lines| {
        for col in (0..out.cols).step_by(block_cols) {
            for k in (0..num_k).step_by(block_k) {
                let block = Block {
                    out,
                    lhs,
                    cols: col..out.cols.min(col + block_cols),
                    k: k..num_k.min(k + block_k),
                    sum_len,
                    add: add || k > 0,
                };
                let num_lines = block.cols.len().div_ceil(PANEL_COLS) * block.panel_lines();
                let lines = first_lines(lines, num_lines);
                block.pack_rhs(rhs, lines);
                block.multiply(lines);
            }
        }
    });
}

/// The part of a product that takes one packing of the right matrix.
struct Block<'a> {
    out: &'a MatrixMut<'a>,
    lhs: Matrix<'a>,
    cols: Range<usize>,
    k: Range<usize>,
    /// Terms that are summed in registers.
    sum_len: usize,
    /// Whether the first sum is added to what is there.
    add: bool,
}

// SAFETY: the one part that threads may not simply share is `out`, and each writes rows of its own.
unsafe impl Sync for Block<'_> {}

impl Block<'_> {
    /// Lines of a packed panel of the right matrix.
    fn panel_lines(&self) -> usize {
        self.k.len() * LINES_PER_K
    }

    fn pack_rhs(&self, rhs: Matrix<'_>, lines: &mut [Line]) {
        let panel_lines = self.panel_lines();
        let groups = lines.par_chunks_mut(RHS_PANELS * panel_lines);
        groups
            .enumerate()
            .with_max_len(1)
            .for_each(|(group, lines)| {
                let start = self.cols.start + group * RHS_PANELS * PANEL_COLS;
                let end = self.cols.end.min(start + RHS_PANELS * PANEL_COLS);
                pack(rhs.t(), start..end, self.k.clone(), PANEL_COLS, lines);
            });
    }

    fn multiply(&self, rhs: &[Line]) {
        let num_panels = self.out.rows.div_ceil(PANEL_ROWS);
        let num_threads = rayon::current_num_threads();
        let num_tasks = num_panels.div_ceil(LHS_PANELS).max(2 * num_threads);
        let num_tasks = num_tasks.next_multiple_of(num_threads).min(num_panels);
        let tasks = (0..num_tasks).into_par_iter().with_max_len(1);
        tasks.for_each(|task| {
            let start = task * num_panels / num_tasks * PANEL_ROWS;
            let end = (task + 1) * num_panels / num_tasks * PANEL_ROWS;
            let rows = start..end.min(self.out.rows);
            with_buffer(1, |lines| self.multiply_rows(rows, rhs, lines));
        });
    }

    fn multiply_rows(&self, rows: Range<usize>, rhs: &[Line], lines: &mut Vec<Line>) {
        for first in self.k.clone().step_by(self.sum_len) {
            let k = first..self.k.end.min(first + self.sum_len);
            let num_lines = rows.len().div_ceil(PANEL_ROWS) * k.len();
            let lines = first_lines(lines, num_lines);
            pack(self.lhs, rows.clone(), k.clone(), PANEL_ROWS, lines);
            let rhs_lines =
                (k.start - self.k.start) * LINES_PER_K..(k.end - self.k.start) * LINES_PER_K;
            for (panel, rhs) in rhs.chunks_exact(self.panel_lines()).enumerate() {
                let col = self.cols.start + panel * PANEL_COLS;
                for (panel, lhs) in lines.chunks_exact(k.len()).enumerate() {
                    let row = rows.start + panel * PANEL_ROWS;
                    // SAFETY: the processor has AVX-512 or there would be no block; the tile lies inside `out`, and nobody
                    // else writes these rows.
                    unsafe {
                        let tile = Tile {
                            data: self.out.data.add(row * self.out.row_stride + col),
                            row_stride: self.out.row_stride,
                            rows: (rows.end - row).min(PANEL_ROWS),
                            cols: (self.cols.end - col).min(PANEL_COLS),
                        };
                        let add = self.add || first > self.k.start;
                        multiply_tile(tile, add, lhs, &rhs[rhs_lines.clone()]);
                    }
                }
            }
        }
    }
}

/// The first `len` lines of a buffer, which grows if it has to.
fn first_lines(buffer: &mut Vec<Line>, len: usize) -> &mut [Line] {
    if buffer.len() < len {
        buffer.resize(len, Line::ZERO);
    }
    &mut buffer[..len]
}

/// Calls `f` with a buffer of this thread. It is taken out meanwhile: a thread that waits for others inside `f` may be
/// given another product to work on.
fn with_buffer(index: usize, f: impl FnOnce(&mut Vec<Line>)) {
    BUFFERS.with(|buffers| {
        let mut buffer = buffers[index].take();
        f(&mut buffer);
        buffers[index].set(buffer);
    });
}

#[cfg(test)]
mod tests {
    use super::{is_worth_it, product};
    use crate::matrix::{Matrix, MatrixMut, SUM_LEN};
    use rayon::prelude::*;

    /// Numbers in -1..1.
    fn values(len: usize, seed: usize) -> Vec<f32> {
        let value = |i: usize| ((i + seed) * 2_654_435_761 % 100_003) as f32 / 50_001.5 - 1.0;
        (0..len).map(value).collect()
    }

    /// Products inside larger buffers, of matrices stored by rows and by columns.
    fn check(rows: usize, cols: usize, num_k: usize, add: bool) {
        let (lhs, rhs) = (values(rows * num_k, 1), values(num_k * cols, 7));
        for (lhs_by_rows, rhs_by_rows) in [(true, true), (true, false), (false, true)] {
            let lhs = match lhs_by_rows {
                true => Matrix::new(&lhs, rows, num_k, num_k),
                false => Matrix::new(&lhs, num_k, rows, rows).t(),
            };
            let rhs = match rhs_by_rows {
                true => Matrix::new(&rhs, num_k, cols, cols),
                false => Matrix::new(&rhs, cols, num_k, num_k).t(),
            };
            let stride = cols + 5;
            let mut out = vec![0.5f32; rows * stride];
            let mut matrix = MatrixMut::new(&mut out, rows, cols, stride);
            // SAFETY: the tests ask whether the processor has AVX-512, and the shapes fit.
            unsafe { product(&mut matrix, add, lhs, rhs) };
            for (i, &got) in out.iter().enumerate() {
                let (row, col) = (i / stride, i % stride);
                if col >= cols {
                    assert_eq!(got, 0.5, "beyond row {row} of {rows} x {cols} x {num_k}");
                    continue;
                }
                let (a, b) = (row * lhs.row_stride, col * rhs.col_stride);
                let term = |k: usize| {
                    let factors = (
                        lhs.data[a + k * lhs.col_stride],
                        rhs.data[b + k * rhs.row_stride],
                    );
                    f64::from(factors.0) * f64::from(factors.1)
                };
                let want = (0..num_k).map(term).sum::<f64>() + if add { 0.5 } else { 0.0 };
                // Each term is rounded once for each term after it in its sum, and for each later sum.
                let magnitude = (0..num_k).map(|k| term(k).abs()).sum::<f64>() + 0.5;
                let num_roundings = num_k.min(SUM_LEN) + num_k.div_ceil(SUM_LEN);
                let bound = f64::from(f32::EPSILON) / 2.0 * num_roundings as f64 * magnitude;
                assert!(
                    (f64::from(got) - want).abs() < bound,
                    "{row}, {col}: {got} {want}"
                );
            }
        }
    }

    #[test]
    fn odd_products_in_larger_buffers() {
        if !is_worth_it(28, 28) {
            return;
        }
        for (rows, cols, num_k) in [(28, 28, 1), (29, 49, 193), (57, 65, 17), (43, 2800, 400)] {
            check(rows, cols, num_k, false);
            check(rows, cols, num_k, true);
        }
    }

    /// A thread that waits inside a product takes up another one, whose packed matrices must not replace its own.
    #[test]
    fn products_that_begin_inside_others() {
        if !is_worth_it(28, 28) {
            return;
        }
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build();
        pool.unwrap().install(|| {
            (0..24).into_par_iter().with_max_len(1).for_each(|i| {
                check(60 + i, 300 + 16 * (i % 5), 40 - i, i % 2 == 0);
            });
        });
    }
}
