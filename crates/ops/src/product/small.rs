//! Matrices that are packed once for many small products, each on the calling thread.

use super::matrix::{Matrix, MatrixMut};
use crate::cpu::element::Element;
use crate::cpu::lines::{LANES, Line, Lines, floats, floats_mut};
use std::ops::{DerefMut, Range};

/// Where ranges of columns and of `k` of a packed matrix may begin: at multiples of it.
pub(crate) const STEP: usize = 2 * LANES;

/// Sums row by row, in f32: in scratch memory, or in a `Vec` that may go to another thread.
pub(crate) struct Sums<L = Lines> {
    lines: L,
    row_lines: usize,
}

/// The rows of sums from one on.
pub(crate) struct Rows<'a> {
    pub(crate) lines: &'a mut [Line],
    pub(crate) row_lines: usize,
}

/// Lines for `rows` by `cols` sums, with room for the whole tiles that products write, and those of a row.
fn size(rows: usize, cols: usize) -> (usize, usize) {
    let row_lines = cols.next_multiple_of(STEP) / LANES;
    (rows.next_multiple_of(STEP) * row_lines, row_lines)
}

impl Sums {
    /// Of any content.
    pub(crate) fn new(rows: usize, cols: usize) -> Self {
        let (len, row_lines) = size(rows, cols);
        Self {
            lines: Lines::new(len),
            row_lines,
        }
    }
}

impl Sums<Vec<Line>> {
    pub(crate) fn zeros(rows: usize, cols: usize) -> Self {
        let (len, row_lines) = size(rows, cols);
        Self {
            lines: vec![Line::ZERO; len],
            row_lines,
        }
    }
}

impl<L: DerefMut<Target = [Line]>> Sums<L> {
    pub(crate) fn rows_from(&mut self, first: usize) -> Rows<'_> {
        Rows {
            lines: &mut self.lines[first * self.row_lines..],
            row_lines: self.row_lines,
        }
    }

    /// A row, with what lies between it and the next.
    pub(crate) fn row(&self, row: usize) -> &[f32] {
        floats(&self.lines[row * self.row_lines..][..self.row_lines])
    }

    pub(crate) fn rows(&self, rows: Range<usize>) -> impl Iterator<Item = &[f32]> {
        rows.map(|row| self.row(row))
    }

    /// All rows, to be changed.
    pub(crate) fn rows_mut(&mut self) -> impl Iterator<Item = &mut [f32]> {
        floats_mut(&mut self.lines).chunks_exact_mut(self.row_lines * LANES)
    }

    /// The first rows and columns.
    pub(crate) fn matrix(&self, rows: usize, cols: usize) -> Matrix<'_> {
        Matrix::new(floats(&self.lines), rows, cols, self.row_lines * LANES)
    }
}

/// How small products are computed.
pub(crate) trait SmallProducts {
    /// A right matrix, packed.
    type Rhs: Send + Sync;

    /// Rows of the left matrix that make full tiles.
    const BLOCK_ROWS: usize;

    /// Packs a right matrix `(k, cols)`.
    fn pack<T: Element>(rhs: Matrix<'_, T>) -> Self::Rhs;

    /// `sums = lhs * rhs`, or `sums += lhs * rhs` if `add`, of those `k` and columns of the right matrix, which begin at multiples of
    /// [`STEP`]: into the first columns. What the sums hold in the rest of a tile of 32 x 32 is lost.
    fn multiply<T: Element>(
        sums: Rows<'_>,
        add: bool,
        lhs: Matrix<'_, T>,
        rhs: &Self::Rhs,
        k: Range<usize>,
        cols: Range<usize>,
    );
}

/// By the `gemm` crate, which takes f32.
pub(crate) struct Gemm;

impl SmallProducts for Gemm {
    /// The values row by row, and their number in a row.
    type Rhs = (Vec<f32>, usize);

    const BLOCK_ROWS: usize = 32;

    fn pack<T: Element>(rhs: Matrix<'_, T>) -> Self::Rhs {
        let mut values = Vec::with_capacity(rhs.rows * rhs.cols);
        for row in 0..rhs.rows {
            let places = (0..rhs.cols).map(|col| row * rhs.row_stride + col * rhs.col_stride);
            values.extend(places.map(|place| rhs.data[place].widen()));
        }
        (values, rhs.cols)
    }

    fn multiply<T: Element>(
        sums: Rows<'_>,
        add: bool,
        lhs: Matrix<'_, T>,
        (values, row_len): &Self::Rhs,
        k: Range<usize>,
        cols: Range<usize>,
    ) {
        let row_stride = sums.row_lines * LANES;
        let sums = floats_mut(sums.lines);
        let mut sums = MatrixMut::new(sums, lhs.rows, cols.len(), row_stride);
        let rhs = values
            .get(k.start * row_len + cols.start..)
            .unwrap_or_default();
        let rhs = Matrix::new(rhs, k.len(), cols.len(), *row_len);
        sums.small_product(add, lhs, rhs);
    }
}

/// Evaluates an expression with `$p` being the best [`SmallProducts`] of this processor for values of `$t`.
macro_rules! with_small_products {
    ($t:ty, $p:ident => $expression:expr) => {{
        #[cfg(target_arch = "x86_64")]
        $crate::product::kernels::with_kernel!($t, $crate::product::kernels::ANY_SIZE, $crate::settings::matmul_precision::MatmulPrecision::Highest, K => {
            type $p = $crate::product::small_by_kernel::Small<K>;
            return $expression;
        });
        type $p = $crate::product::small::Gemm;
        $expression
    }};
}
pub(crate) use with_small_products;
