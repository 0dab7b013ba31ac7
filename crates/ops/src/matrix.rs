//! Strided matrices inside larger buffers, to read and to write.

#![allow(unsafe_code)]

use crate::element::Element;
use crate::packed_weight::Panels;
use crate::vectorised::vectorised;
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

/// Two matrices to multiply.
#[derive(Clone, Copy)]
pub(crate) struct Factors<'a, T = f32> {
    pub(crate) lhs: Matrix<'a, T>,
    pub(crate) rhs: Matrix<'a, T>,
    /// The right one once more, in the order in which products read it.
    pub(crate) panels: Option<&'a Panels>,
}

impl<'a, T> Factors<'a, T> {
    pub(crate) fn new(lhs: Matrix<'a, T>, rhs: Matrix<'a, T>) -> Self {
        let panels = None;
        Self { lhs, rhs, panels }
    }
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

/// A buffer of which several threads write disjoint parts: chunks, or strided matrices such as the heads of `(t, heads, d)`.
pub(crate) struct SharedBuffer<'a, T> {
    data: *mut T,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: the only access is through `change_row`, whose callers keep the rows in use at one time disjoint.
unsafe impl<T: Send> Sync for SharedBuffer<'_, T> {}

impl<'a, T> SharedBuffer<'a, T> {
    /// Borrows `data` for as long as threads write to it.
    pub(crate) fn new(data: &'a mut [T]) -> Self {
        Self {
            data: data.as_mut_ptr(),
            len: data.len(),
            lifetime: PhantomData,
        }
    }

    /// Lets `change` change `len` elements from `start` on.
    ///
    /// # Safety
    /// Nobody else uses these elements at the same time.
    pub(crate) unsafe fn change_row(
        &self,
        start: usize,
        len: usize,
        change: impl FnOnce(&mut [T]),
    ) {
        assert!(
            start <= self.len && len <= self.len - start,
            "row of {len} elements at {start} in a buffer of {}",
            self.len
        );
        // SAFETY: the elements are in the buffer by the check above, and only ours as promised by the caller.
        change(unsafe { std::slice::from_raw_parts_mut(self.data.add(start), len) });
    }
}

impl<T: Element> SharedBuffer<'_, T> {
    /// Writes rows of `cols` elements, `row_stride` apart, from element `start` on, or if `ADD` adds them to what is there: values, each times the factor of
    /// its row, rounded.
    ///
    /// # Safety
    /// Nobody else uses these elements at the same time.
    pub(crate) unsafe fn put_rows<'v, const ADD: bool>(
        &self,
        start: usize,
        row_stride: usize,
        cols: usize,
        rows: impl Iterator<Item = (&'v [f32], f32)>,
    ) {
        for (row, (values, factor)) in rows.enumerate() {
            let change = |out: &mut [T]| {
                vectorised(
                    #[inline(always)]
                    || {
                        for (out, value) in out.iter_mut().zip(values) {
                            let value = value * factor;
                            *out = T::nearest(if ADD { out.widen() + value } else { value });
                        }
                    },
                );
            };
            // SAFETY: the caller's promise.
            unsafe { self.change_row(start + row * row_stride, cols, change) };
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

#[cfg(test)]
mod tests {
    use super::SharedBuffer;

    #[test]
    #[should_panic(expected = "in a buffer of 7")]
    fn rows_beyond_a_shared_buffer_are_refused() {
        let mut out = [0f32; 7];
        let shared = SharedBuffer::new(&mut out);
        let row: &[f32] = &[1.0; 3];
        // SAFETY: nobody else writes.
        unsafe { shared.put_rows::<false>(1, 4, 3, [(row, 1.0), (row, 1.0)].into_iter()) };
    }
}
