//! Strided matrices inside larger buffers, to read and to write.

use std::marker::PhantomData;

/// Products of fewer multiplications than this stay on the calling thread: waking the others would cost more.
pub(crate) const PARALLEL_MULTIPLICATIONS: usize = 1 << 21;
/// Most terms of f32 that are summed in one go.
pub(crate) const SUM_LEN: usize = 192;

/// What is added to a product before it is rounded.
#[derive(Clone, Copy)]
pub(crate) enum Addend<'a, Out> {
    Nothing,
    /// What the result holds.
    Result,
    /// These numbers, one for each element of the result, row by row.
    Values(&'a [Out]),
    /// These numbers, one for each column.
    Bias(&'a [f32]),
}

/// A matrix to read.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a, T = f32> {
    pub(crate) data: &'a [T],
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_stride: usize,
    pub(crate) col_stride: usize,
}

impl<'a, T> Matrix<'a, T> {
    /// `rows` rows of `cols` elements, `row_stride` apart, from the start of `data`.
    pub(crate) fn new(data: &'a [T], rows: usize, cols: usize, row_stride: usize) -> Self {
        let data = &data[..extent(rows, cols, row_stride)];
        Self {
            data,
            rows,
            cols,
            row_stride,
            col_stride: 1,
        }
    }

    /// `count` columns from `first` on.
    pub(crate) fn columns(self, first: usize, count: usize) -> Self {
        Self {
            data: self.data.get(first * self.col_stride..).unwrap_or_default(),
            cols: count,
            ..self
        }
    }

    /// The transpose, without moving anything.
    pub(crate) fn t(self) -> Self {
        Self {
            data: self.data,
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }

    /// The matrix with `data` in the places of its elements.
    pub(crate) fn with<'b, U>(&self, data: &'b [U]) -> Matrix<'b, U> {
        Matrix {
            data,
            rows: self.rows,
            cols: self.cols,
            row_stride: self.row_stride,
            col_stride: self.col_stride,
        }
    }
}

/// A matrix to write.
pub(crate) struct MatrixMut<'a, T = f32> {
    pub(crate) data: *mut T,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_stride: usize,
    pub(crate) lifetime: PhantomData<&'a mut [T]>,
}

impl<'a, T> MatrixMut<'a, T> {
    /// `rows` rows of `cols` elements, `row_stride` apart, from the start of `data`.
    pub(crate) fn new(data: &'a mut [T], rows: usize, cols: usize, row_stride: usize) -> Self {
        let data = data[..extent(rows, cols, row_stride)].as_mut_ptr();
        Self {
            data,
            rows,
            cols,
            row_stride,
            lifetime: PhantomData,
        }
    }
}

/// Elements from the first to the last of a strided matrix.
fn extent(rows: usize, cols: usize, row_stride: usize) -> usize {
    if rows == 0 || cols == 0 {
        0
    } else {
        (rows - 1) * row_stride + cols
    }
}
