//! Products of few rows with the transpose of a matrix, as linear layers have their weights: each of its values is read from memory once, in its own
//! type, which is what they take as long as memory is slower than the cores. Nothing is allocated by the size of the matrix.
//!
//! An element is the sum of its products in one order, whatever the number of rows beside it and of threads.

use super::factors::Factors;
use super::matrix::Matrix;
use crate::cpu::element::Element;
use crate::cpu::lines::{LANES, Line, Lines, floats, floats_mut, prefetch};
use crate::cpu::vector::{Kernel, Vector, run_widest};
use candle_core::DType;
use rayon::prelude::*;
use std::ops::Range;

/// With more rows than this the values are used often enough to be packed first.
pub(crate) const MAX_ROWS: usize = 16;
/// Rows that use a value of the matrix while it is in a register, at most.
const ROWS_AT_ONCE: usize = 4;
/// Columns of the result that are summed at once: as many rows of the matrix are read side by side, which memory serves faster than one.
pub(crate) const COLS_AT_ONCE: usize = 4;
/// Products that are summed before they are added to the others: values of so many of 16 rows fit the first-level cache, or nearly.
const SEGMENT: usize = 512;
/// Bytes of the matrix that a task reads: some microseconds.
const TASK_BYTES: usize = 1 << 17;

/// The rows of a matrix.
pub(crate) trait WeightRows: Sync {
    /// Whether its values are not f32, so that for more than [`ROWS_AT_ONCE`] rows they are made f32 once for all.
    const ARE_UNPACKED: bool = true;

    fn row_bytes(&self) -> usize;

    /// The products of the values of each of `C` rows from `first` on, from value `start` on, a multiple of [`SEGMENT`], with `R` rows of as many.
    ///
    /// # Safety
    /// As for `V`.
    unsafe fn dots<V: Vector, const C: usize, const R: usize>(
        &self,
        first: usize,
        start: usize,
        xs: [&[f32]; R],
    ) -> [[f32; R]; C];

    /// Writes the values of a row from `start` on, as above, in f32.
    ///
    /// # Safety
    /// As for `V`.
    unsafe fn unpack<V: Vector>(&self, row: usize, start: usize, values: &mut [f32]);
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
    const ARE_UNPACKED: bool = !matches!(T::DTYPE, DType::F32);

    fn row_bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    #[inline(always)]
    unsafe fn dots<V: Vector, const C: usize, const R: usize>(
        &self,
        first: usize,
        start: usize,
        xs: [&[f32]; R],
    ) -> [[f32; R]; C] {
        let len = xs[0].len();
        assert!(xs.iter().all(|xs| xs.len() == len));
        let rows: [_; C] =
            std::array::from_fn(|col| self.row(first + col)[start..start + len].as_ptr());
        // SAFETY: as promised by the caller; all rows have `len` values.
        unsafe {
            let mut sums = [[V::splat(0.0); R]; C];
            let mut at = 0;
            while at + V::LANES <= len {
                let mut values = [V::splat(0.0); R];
                for row in 0..R {
                    values[row] = V::load(xs[row].as_ptr().add(at));
                }
                for col in 0..C {
                    let weights = V::load(rows[col].add(at));
                    for row in 0..R {
                        sums[col][row] = weights.times_plus(values[row], sums[col][row]);
                    }
                }
                at += V::LANES;
            }
            if at < len {
                let mut values = [V::splat(0.0); R];
                for row in 0..R {
                    values[row] = V::load_first(xs[row].as_ptr().add(at), len - at);
                }
                for col in 0..C {
                    let weights = V::load_first(rows[col].add(at), len - at);
                    for row in 0..R {
                        sums[col][row] = weights.times_plus(values[row], sums[col][row]);
                    }
                }
            }
            lane_sums(sums)
        }
    }

    #[inline(always)]
    unsafe fn unpack<V: Vector>(&self, row: usize, start: usize, values: &mut [f32]) {
        let row = &self.row(row)[start..][..values.len()];
        // What comes when the rows that are read side by side are done.
        let next = row.as_ptr().wrapping_add(COLS_AT_ONCE * self.stride);
        let whole = values.len() - values.len() % V::LANES;
        for at in (0..whole).step_by(V::LANES) {
            prefetch(next.wrapping_add(at));
            // SAFETY: as promised by the caller; both have so many values.
            unsafe { V::load(row.as_ptr().add(at)).store(values.as_mut_ptr().add(at)) };
        }
        for (value, weight) in values[whole..].iter_mut().zip(&row[whole..]) {
            *value = weight.widen();
        }
    }
}

/// The sum of the lanes of each vector.
///
/// # Safety
/// As for `V`.
#[inline(always)]
pub(crate) unsafe fn lane_sums<V: Vector, const C: usize, const R: usize>(
    vectors: [[V; R]; C],
) -> [[f32; R]; C] {
    let mut sums = [[0f32; R]; C];
    let (vectors, vectors_left) = vectors.as_flattened().as_chunks::<4>();
    let (fours, left) = sums.as_flattened_mut().as_chunks_mut::<4>();
    for (sums, vectors) in fours.iter_mut().zip(vectors) {
        // SAFETY: as promised by the caller.
        *sums = unsafe { V::sum_each(*vectors) };
    }
    for (sum, vector) in left.iter_mut().zip(vectors_left) {
        // SAFETY: as above.
        *sum = unsafe { vector.sum() };
    }
    sums
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
                    first: i * cols_of_task + group * COLS_AT_ONCE,
                    start,
                    xs,
                    places: start..(start + SEGMENT).min(xs.len),
                    rows,
                };
                match W::ARE_UNPACKED && rows > ROWS_AT_ONCE {
                    true => segment.add_unpacked(sums),
                    false => run_widest(Products { segment, sums }),
                }
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

/// Some values of rows of both matrices.
struct Segment<'a, W> {
    weight: &'a W,
    /// The first of the rows of the weight.
    first: usize,
    /// The first of the values of these rows.
    start: usize,
    xs: &'a RowsOfF32,
    /// Their values in each row of `xs`.
    places: Range<usize>,
    /// Rows of `xs`.
    rows: usize,
}

/// Adds the products with a few rows of the weight to the sums of all rows of each.
struct Products<'a, W> {
    segment: Segment<'a, W>,
    sums: &'a mut [f32],
}

/// Writes the values of a few rows, [`SEGMENT`] apart.
struct Unpack<'a, 'b, W> {
    segment: &'a Segment<'b, W>,
    cols: usize,
    values: &'a mut [f32],
}

impl<W: WeightRows> Segment<'_, W> {
    /// Makes the values of a few rows of the weight f32 first, then adds their products.
    fn add_unpacked(&self, sums: &mut [f32]) {
        let mut unpacked = Lines::new(COLS_AT_ONCE * SEGMENT / LANES);
        run_widest(Unpack {
            segment: self,
            cols: sums.len() / self.rows,
            values: floats_mut(&mut unpacked),
        });
        let segment = Segment {
            weight: &Floats::new(floats(&unpacked), SEGMENT),
            first: 0,
            start: 0,
            xs: self.xs,
            places: self.places.clone(),
            rows: self.rows,
        };
        run_widest(Products { segment, sums });
    }
}

impl<W: WeightRows> Kernel for Unpack<'_, '_, W> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let Segment { weight, places, .. } = self.segment;
        for (col, values) in self.values.chunks_mut(SEGMENT).take(self.cols).enumerate() {
            let row = self.segment.first + col;
            // SAFETY: as promised by the caller.
            unsafe { weight.unpack::<V>(row, self.segment.start, &mut values[..places.len()]) };
        }
    }
}

impl<W: WeightRows> Kernel for Products<'_, W> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(mut self) {
        let mut row = 0;
        while row < self.segment.rows {
            // SAFETY: as promised by the caller.
            row += unsafe {
                match self.segment.rows - row {
                    1 => self.add_rows::<V, 1>(row),
                    2 | 3 => self.add_rows::<V, 2>(row),
                    _ => self.add_rows::<V, ROWS_AT_ONCE>(row),
                }
            };
        }
    }
}

impl<W: WeightRows> Products<'_, W> {
    /// Adds those of `R` rows of `xs` from `row` on; returns `R`.
    ///
    /// # Safety
    /// As for `V`.
    #[inline(always)]
    unsafe fn add_rows<V: Vector, const R: usize>(&mut self, row: usize) -> usize {
        let cols = self.sums.len() / self.segment.rows;
        let mut col = 0;
        while col < cols {
            // Sums and values of `xs` stay in registers.
            let at_once = match COLS_AT_ONCE * R + R < V::REGISTERS {
                true => COLS_AT_ONCE,
                false => COLS_AT_ONCE / 2,
            };
            // SAFETY: as promised by the caller.
            col += unsafe {
                match cols - col >= at_once {
                    true if at_once == COLS_AT_ONCE => self.add::<V, COLS_AT_ONCE, R>(col, row),
                    true => self.add::<V, { COLS_AT_ONCE / 2 }, R>(col, row),
                    false => self.add::<V, 1, R>(col, row),
                }
            };
        }
        R
    }

    /// Adds those of `R` rows of `xs` from `row` on with `C` rows of the weight from `col` on; returns `C`.
    ///
    /// # Safety
    /// As for `V`.
    #[inline(always)]
    unsafe fn add<V: Vector, const C: usize, const R: usize>(
        &mut self,
        col: usize,
        row: usize,
    ) -> usize {
        let segment = &self.segment;
        let xs = std::array::from_fn(|i| segment.xs.values(row + i, segment.places.clone()));
        let first = segment.first + col;
        // SAFETY: as promised by the caller.
        let dots = unsafe { segment.weight.dots::<V, C, R>(first, segment.start, xs) };
        let sums = self.sums[col * segment.rows..].chunks_mut(segment.rows);
        for (sums, dots) in sums.zip(dots) {
            for (sum, dot) in sums[row..].iter_mut().zip(dots) {
                *sum += dot;
            }
        }
        C
    }
}

#[cfg(test)]
mod tests {
    use super::{Floats, MAX_ROWS, Products, RowsOfF32, Segment, few_rows_product};
    use crate::cpu::element::Element;
    use crate::cpu::vector::{Kernel, Vector, run_each};
    use crate::product::factors::Factors;
    use crate::product::matrix::Matrix;
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

    /// The sums of six rows of 41 values with seven.
    struct Sums<'a>(&'a RowsOfF32, &'a Floats<'a, bf16>);

    impl Kernel for Sums<'_> {
        type Output = Vec<f32>;

        #[inline(always)]
        unsafe fn run<V: Vector>(self) -> Vec<f32> {
            let mut sums = vec![0f32; 42];
            let products = Products {
                segment: Segment {
                    weight: self.1,
                    first: 0,
                    start: 0,
                    xs: self.0,
                    places: 0..41,
                    rows: 6,
                },
                sums: &mut sums,
            };
            // SAFETY: as promised by the caller.
            unsafe { products.run::<V>() };
            sums
        }
    }

    #[test]
    fn all_vectors_have_the_same_products() {
        let num_k = 41;
        let (xs, weight) = (values::<f32>(6 * num_k, 3), values::<bf16>(7 * num_k, 5));
        let (rows, weight) = (
            RowsOfF32::new(xs.chunks(num_k), num_k),
            Floats::new(&weight, num_k),
        );
        for got in run_each(|| Sums(&rows, &weight)) {
            for (i, got) in got.iter().enumerate() {
                let (col, row) = (i / 6, i % 6);
                let terms = (0..num_k).map(|k| {
                    f64::from(xs[row * num_k + k]) * f64::from(weight.row(col)[k].widen())
                });
                let want: f64 = terms.sum();
                assert!((f64::from(*got) - want).abs() <= 1e-5, "{i}: {got} {want}");
            }
        }
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
