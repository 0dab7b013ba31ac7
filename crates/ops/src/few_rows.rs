//! Products of few rows with the transpose of a matrix, as linear layers have their weights: each of its values is read once, where it is and in
//! its own type, which is what they take as long as memory is slower than the cores. Nothing is allocated by the size of the matrix.
//!
//! An element is the sum of its products in one order, whatever the number of rows beside it and of threads.

#![allow(unsafe_code)]

use crate::element::Element;
use crate::lanes;
use crate::lines::{LANES, Line, floats, floats_mut};
use crate::matrix::{Factors, Matrix};
#[cfg(target_arch = "x86_64")]
use crate::processor::has_avx512;
use crate::vectorised::vectorised;
use rayon::prelude::*;
use std::ops::Range;

/// With more rows than this the values are used often enough to be packed first.
pub(crate) const MAX_ROWS: usize = 16;
/// Rows that use a value of the matrix while it is in a register, at most.
const ROWS_AT_ONCE: usize = 4;
/// Columns of the result that are summed at once: as many rows of the matrix are read side by side, which memory serves faster than one.
pub(crate) const COLS_AT_ONCE: usize = 4;
/// Products that are summed before they are added to the others: values of so many of 16 rows fit the first-level cache.
const SEGMENT: usize = 512;
/// Bytes of the matrix that a task reads: some microseconds.
const TASK_BYTES: usize = 1 << 17;

/// The rows of a matrix.
pub(crate) trait WeightRows: Sync {
    fn row_bytes(&self) -> usize;

    /// Adds to the sums of each of [`COLS_AT_ONCE`] rows at most from `first` on the products of its values from `start` on, a multiple of
    /// [`SEGMENT`], with `R` rows of as many.
    fn add_dots<const R: usize>(
        &self,
        first: usize,
        start: usize,
        xs: [&[f32]; R],
        sums: &mut [[f32; R]],
    );
}

/// Rows of values in f32, each from the start of a cache line on.
pub(crate) struct RowsOfF32 {
    lines: Vec<Line>,
    row_lines: usize,
    len: usize,
}

impl RowsOfF32 {
    /// So many rows of `len` values.
    pub(crate) fn new<'a, T: Element>(
        rows: impl ExactSizeIterator<Item = &'a [T]>,
        len: usize,
    ) -> Self {
        let row_lines = len.div_ceil(LANES);
        let mut lines = vec![Line::ZERO; rows.len() * row_lines];
        let places = floats_mut(&mut lines).chunks_mut((row_lines * LANES).max(1));
        for (places, row) in places.zip(rows) {
            for (place, value) in places.iter_mut().zip(row) {
                *place = value.widen();
            }
        }
        Self {
            lines,
            row_lines,
            len,
        }
    }

    fn values(&self, row: usize, places: Range<usize>) -> &[f32] {
        &floats(&self.lines[row * self.row_lines..][..self.row_lines])[places]
    }
}

/// Rows of floats, so many values apart.
pub(crate) struct Floats<'a, T> {
    values: &'a [T],
    len: usize,
    stride: usize,
}

impl<'a, T> Floats<'a, T> {
    /// Rows of `len` values, one after the other.
    pub(crate) fn new(values: &'a [T], len: usize) -> Self {
        Self {
            values,
            len,
            stride: len,
        }
    }

    /// The columns of a matrix, if they lie in memory as rows.
    fn of_columns(rhs: &Matrix<'a, T>) -> Option<Self> {
        (rhs.row_stride == 1 || rhs.rows == 1).then_some(Self {
            values: rhs.data,
            len: rhs.rows,
            stride: rhs.col_stride,
        })
    }

    fn row(&self, row: usize) -> &'a [T] {
        &self.values[row * self.stride..][..self.len]
    }
}

impl<T: Element> WeightRows for Floats<'_, T> {
    fn row_bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    fn add_dots<const R: usize>(
        &self,
        first: usize,
        start: usize,
        xs: [&[f32]; R],
        sums: &mut [[f32; R]],
    ) {
        let len = xs[0].len();
        let row = |col: usize| &self.row(first + col)[start..start + len];
        if sums.len() == COLS_AT_ONCE {
            let rows = std::array::from_fn(row);
            return add(sums, &dots_of_segment::<T, COLS_AT_ONCE, R>(rows, xs));
        }
        for (col, sums) in sums.iter_mut().enumerate() {
            add(std::slice::from_mut(sums), &dots_of_segment([row(col)], xs));
        }
    }
}

/// Adds products to the sums of as many rows.
pub(crate) fn add<const R: usize>(sums: &mut [[f32; R]], dots: &[[f32; R]]) {
    for (sum, dot) in sums.as_flattened_mut().iter_mut().zip(dots.as_flattened()) {
        *sum += dot;
    }
}

/// The products of rows of the matrix with others, all of one length.
fn dots_of_segment<T: Element, const C: usize, const R: usize>(
    rows: [&[T]; C],
    xs: [&[f32]; R],
) -> [[f32; R]; C] {
    #[cfg(target_arch = "x86_64")]
    if has_avx512() {
        let len = xs[0].len();
        assert!(rows.iter().all(|row| row.len() == len) && xs.iter().all(|xs| xs.len() == len));
        // SAFETY: the processor has what the function is compiled for, and the rows have this length.
        return unsafe { avx512::dots(rows.map(<[T]>::as_ptr), xs.map(<[f32]>::as_ptr), len) };
    }
    vectorised(
        #[inline(always)]
        || rows.map(|row| xs.map(|xs| lanes::dot(row, xs))),
    )
}

/// Multiply-adds, which have twice the speed of products and sums.
#[cfg(target_arch = "x86_64")]
mod avx512 {
    use crate::element::Element;
    use crate::lines::LANES;
    use crate::product_lanes::Lanes;
    use std::arch::x86_64::{
        __m512, _mm512_castsi512_ps, _mm512_fmadd_ps, _mm512_reduce_add_ps, _mm512_setzero_ps,
    };

    /// # Safety
    /// The processor has AVX-512, and all rows have `len` values.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    pub(super) unsafe fn dots<T: Element, const C: usize, const R: usize>(
        rows: [*const T; C],
        xs: [*const f32; R],
        len: usize,
    ) -> [[f32; R]; C] {
        let mut sums = [[_mm512_setzero_ps(); R]; C];
        let whole = len - len % LANES;
        for at in (0..whole).step_by(LANES) {
            // SAFETY: so many values are there.
            unsafe { add_products(&mut sums, rows, xs, at, LANES) };
        }
        if whole < len {
            // SAFETY: as above.
            unsafe { add_products(&mut sums, rows, xs, whole, len - whole) };
        }
        sums.map(|sums| sums.map(|sum| _mm512_reduce_add_ps(sum)))
    }

    /// # Safety
    /// The processor has AVX-512, and there are `len` values from `at` on, 16 at most.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn add_products<T: Element, const C: usize, const R: usize>(
        sums: &mut [[__m512; R]; C],
        rows: [*const T; C],
        xs: [*const f32; R],
        at: usize,
        len: usize,
    ) {
        // SAFETY: as promised by the caller.
        let xs = xs.map(|xs| _mm512_castsi512_ps(unsafe { f32::terms(xs.add(at), len) }));
        for col in 0..C {
            // SAFETY: as above.
            let weights = unsafe { T::terms(rows[col].add(at), len) };
            let weights = _mm512_castsi512_ps(weights);
            for row in 0..R {
                sums[col][row] = _mm512_fmadd_ps(weights, xs[row], sums[col][row]);
            }
        }
    }
}

/// The sum of products of matrices of few rows with others whose columns lie in memory as rows, row by row; `None` if they are none.
pub(crate) fn few_rows_product<T: Element>(factors: &[Factors<'_, T>]) -> Option<Vec<f32>> {
    let (rows, cols) = (factors[0].lhs.rows, factors[0].rhs.cols);
    if rows > MAX_ROWS {
        return None;
    }
    let mut pairs = Vec::new();
    for Factors { lhs, rhs, .. } in factors.iter().filter(|factors| factors.lhs.cols > 0) {
        let lies_in_rows = lhs.col_stride == 1 || lhs.cols == 1;
        let weight = Floats::of_columns(rhs).filter(|_| lies_in_rows)?;
        let rows = (0..rows).map(|row| &lhs.data[row * lhs.row_stride..][..lhs.cols]);
        pairs.push((RowsOfF32::new(rows, lhs.cols), weight));
    }
    Some(few_rows(rows, cols, &pairs))
}

/// The sum of products of `rows` rows of values each with the rows of a matrix, of which there are `cols`: (rows, cols).
pub(crate) fn few_rows<W: WeightRows>(
    rows: usize,
    cols: usize,
    pairs: &[(RowsOfF32, W)],
) -> Vec<f32> {
    if rows * cols == 0 {
        return Vec::new();
    }
    // Of each column the sums of all rows.
    let mut by_col = vec![0f32; rows * cols];
    let row_bytes: usize = pairs.iter().map(|(_, weight)| weight.row_bytes()).sum();
    let groups_of_task = (TASK_BYTES / (COLS_AT_ONCE * row_bytes).max(1)).max(1);
    let cols_of_task = groups_of_task * COLS_AT_ONCE;
    let task = |(i, sums): (usize, &mut [f32])| {
        for (xs, weight) in pairs {
            let add_segment = |start: usize, (group, sums): (usize, &mut [f32])| {
                let segment = Segment {
                    weight,
                    xs,
                    places: start..(start + SEGMENT).min(xs.len),
                    rows,
                };
                segment.add_group(i * cols_of_task + group * COLS_AT_ONCE, sums);
            };
            let starts = (0..xs.len).step_by(SEGMENT);
            // Of few rows in the order of memory; of more each segment of them serves all groups while it is in the first-level cache. An element's order
            // is the same.
            match rows <= ROWS_AT_ONCE {
                true => {
                    for (group, sums) in sums.chunks_mut(COLS_AT_ONCE * rows).enumerate() {
                        starts
                            .clone()
                            .for_each(|start| add_segment(start, (group, &mut *sums)));
                    }
                }
                false => {
                    for start in starts {
                        let groups = sums.chunks_mut(COLS_AT_ONCE * rows).enumerate();
                        groups.for_each(|group| add_segment(start, group));
                    }
                }
            }
        }
    };
    match cols_of_task >= cols {
        true => task((0, &mut by_col)),
        false => {
            let tasks = by_col.par_chunks_mut(cols_of_task * rows);
            tasks.enumerate().for_each(task);
        }
    }
    if rows == 1 {
        return by_col;
    }
    let of_row = |row: usize| by_col.iter().skip(row).step_by(rows);
    (0..rows).flat_map(of_row).copied().collect()
}

/// Some values of all rows of both matrices.
struct Segment<'a, W> {
    weight: &'a W,
    xs: &'a RowsOfF32,
    places: Range<usize>,
    /// Rows of `xs`.
    rows: usize,
}

impl<W: WeightRows> Segment<'_, W> {
    /// Adds the products with a few rows of the weight from `col` on to the sums of all rows of each.
    fn add_group(&self, col: usize, sums: &mut [f32]) {
        let mut first = 0;
        while first < self.rows {
            first += match self.rows - first {
                1 => self.add_rows::<1>(col, first, sums),
                2 | 3 => self.add_rows::<2>(col, first, sums),
                _ => self.add_rows::<ROWS_AT_ONCE>(col, first, sums),
            };
        }
    }

    /// Those of `R` rows from `first` on; how many these are.
    fn add_rows<const R: usize>(&self, col: usize, first: usize, sums: &mut [f32]) -> usize {
        let xs = std::array::from_fn(|i| self.xs.values(first + i, self.places.clone()));
        let mut dots = [[0f32; R]; COLS_AT_ONCE];
        let cols = sums.len() / self.rows;
        let start = self.places.start;
        (self.weight).add_dots::<R>(col, start, xs, &mut dots[..cols]);
        for (sums, dots) in sums.chunks_mut(self.rows).zip(dots) {
            for (sum, dot) in sums[first..].iter_mut().zip(dots) {
                *sum += dot;
            }
        }
        R
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_ROWS, few_rows_product};
    use crate::element::Element;
    use crate::matrix::{Factors, Matrix};
    use half::{bf16, f16};

    /// Numbers in -1..1, of `T`.
    fn values<T: Element>(len: usize, seed: usize) -> Vec<T> {
        let value = |i: usize| ((i + seed) * 2_654_435_761 % 100_003) as f32 / 50_001.5 - 1.0;
        (0..len).map(|i| T::nearest(value(i))).collect()
    }

    fn check<T: Element>() {
        for (num_k, cols) in [(1, 1), (31, 5), (64, 3), (100, 700), (13_000, 9), (0, 4)] {
            let xs = values::<T>(MAX_ROWS * (num_k + 3), num_k);
            let weight = values::<T>(cols * (num_k + 2), cols);
            let other = values::<T>(cols * (num_k + 2), 8);
            let product = |first: usize, rows: usize| {
                let lhs = Matrix::new(&xs[first * (num_k + 3)..], rows, num_k, num_k + 3);
                let rhs = |values| Matrix::new(values, cols, num_k, num_k + 2).t();
                few_rows_product(
                    &[&weight, &other].map(|weight| Factors::new(lhs, rhs(&weight[..]))),
                )
                .unwrap()
            };
            let all = product(0, MAX_ROWS);
            for (i, got) in all.iter().enumerate() {
                let (row, col) = (i / cols, i % cols);
                let (mut want, mut magnitude) = (0f64, 0f64);
                for values in [&weight, &other] {
                    for k in 0..num_k {
                        let x = f64::from(xs[row * (num_k + 3) + k].widen());
                        let term = x * f64::from(values[col * (num_k + 2) + k].widen());
                        want += term;
                        magnitude += term.abs();
                    }
                }
                let bound = 4e-6 * magnitude;
                assert!(
                    (f64::from(*got) - want).abs() <= bound,
                    "{i} of {num_k} x {cols}"
                );
            }
            let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build();
            let alone = pool.unwrap().install(|| product(0, MAX_ROWS));
            assert!(alone == all);
            for (first, rows) in [(0, 1), (3, 1), (2, 2), (5, 3), (7, 5), (15, 1)] {
                assert!(product(first, rows) == all[first * cols..(first + rows) * cols]);
            }
        }
    }

    #[test]
    fn an_element_does_not_depend_on_the_rows_beside_it() {
        check::<f32>();
        check::<bf16>();
        check::<f16>();
    }

    #[test]
    fn matrices_that_lie_otherwise_are_left_to_others() {
        let values = values::<f32>(400, 1);
        let (few, many) = (
            Matrix::new(&values, 2, 8, 8),
            Matrix::new(&values, 17, 8, 8),
        );
        let weight = Matrix::new(&values, 9, 8, 8).t();
        assert!(few_rows_product(&[Factors::new(few, weight)]).is_some());
        assert!(few_rows_product(&[Factors::new(many, weight)]).is_none());
        assert!(few_rows_product(&[Factors::new(few, Matrix::new(&values, 8, 9, 9))]).is_none());
        assert!(
            few_rows_product(&[Factors::new(Matrix::new(&values, 8, 2, 2).t(), weight)]).is_none()
        );
    }
}
