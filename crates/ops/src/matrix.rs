//! Strided f32 matrices inside larger buffers, and their products: large ones by `avx512_product` where the processor allows,
//! the others by the `gemm` crate.
//!
//! Both cut the rows and columns of a product among threads, never the sum over `k`: the bits are the same for any number of
//! threads. A sum over `k` is made of sums of at most 192 terms, whose rounding errors stay smaller than those of one long sum.

#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use crate::avx512_product;
use gemm::Parallelism;
use std::marker::PhantomData;

/// Products of fewer multiplications than this stay on the calling thread: waking the others would cost more.
const PARALLEL_MULTIPLICATIONS: usize = 1 << 21;
/// Most terms that are summed in one go.
pub(crate) const SUM_LEN: usize = 192;

/// A matrix to read.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_stride: usize,
    pub(crate) col_stride: usize,
}

impl<'a> Matrix<'a> {
    /// `rows` rows of `cols` elements, `row_stride` apart, from the start of `data`.
    pub(crate) fn new(data: &'a [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
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
}

/// A matrix to write.
pub(crate) struct MatrixMut<'a> {
    pub(crate) data: *mut f32,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_stride: usize,
    lifetime: PhantomData<&'a mut [f32]>,
}

impl<'a> MatrixMut<'a> {
    /// `rows` rows of `cols` elements, `row_stride` apart, from the start of `data`.
    pub(crate) fn new(data: &'a mut [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        let data = data[..extent(rows, cols, row_stride)].as_mut_ptr();
        Self {
            data,
            rows,
            cols,
            row_stride,
            lifetime: PhantomData,
        }
    }

    /// `self = lhs * rhs`, on the calling thread.
    pub(crate) fn set_product(&mut self, lhs: Matrix<'_>, rhs: Matrix<'_>) {
        self.write(false, lhs, rhs, Parallelism::None);
    }

    /// `self += lhs * rhs`, on the calling thread.
    pub(crate) fn add_product(&mut self, lhs: Matrix<'_>, rhs: Matrix<'_>) {
        self.write(true, lhs, rhs, Parallelism::None);
    }

    /// `self = lhs * rhs`, or `self += lhs * rhs` if `add`, on all threads of the current pool if that is worth it.
    pub(crate) fn parallel_product(&mut self, add: bool, lhs: Matrix<'_>, rhs: Matrix<'_>) {
        let num_threads = rayon::current_num_threads();
        let multiplications = (lhs.rows * rhs.cols).saturating_mul(lhs.cols);
        if multiplications <= PARALLEL_MULTIPLICATIONS {
            return self.write(add, lhs, rhs, Parallelism::None);
        }
        #[cfg(target_arch = "x86_64")]
        if avx512_product::is_worth_it(self.rows, self.cols) {
            self.check_shapes(lhs, rhs);
            // SAFETY: the processor can, the shapes fit, and without a `k` there would be no multiplications.
            return unsafe { avx512_product::product(self, add, lhs, rhs) };
        }
        match num_threads {
            1 => self.write(add, lhs, rhs, Parallelism::None),
            _ => self.write(add, lhs, rhs, Parallelism::Rayon(num_threads)),
        }
    }

    /// Multiplies each row by its factor.
    pub(crate) fn scale_rows(&mut self, factors: &[f32]) {
        assert_eq!(factors.len(), self.rows);
        if self.cols == 0 {
            return;
        }
        for (row, factor) in factors.iter().enumerate() {
            // SAFETY: the row lies inside this matrix, which is the only access to its elements.
            let row = unsafe {
                let start = self.data.add(row * self.row_stride);
                std::slice::from_raw_parts_mut(start, self.cols)
            };
            row.iter_mut().for_each(|x| *x *= factor);
        }
    }

    /// The pointers are only as good as these shapes.
    fn check_shapes(&self, lhs: Matrix<'_>, rhs: Matrix<'_>) {
        assert_eq!(
            (self.rows, self.cols, lhs.cols),
            (lhs.rows, rhs.cols, rhs.rows)
        );
    }

    fn write(&mut self, add: bool, lhs: Matrix<'_>, rhs: Matrix<'_>, parallelism: Parallelism) {
        self.check_shapes(lhs, rhs);
        if lhs.cols == 0 {
            return self.write_part(add, lhs, rhs, parallelism);
        }
        let sum_len = lhs.cols.div_ceil(lhs.cols.div_ceil(SUM_LEN));
        for k in (0..lhs.cols).step_by(sum_len) {
            let len = sum_len.min(lhs.cols - k);
            let (lhs, rhs) = (lhs.columns(k, len), rhs.t().columns(k, len).t());
            self.write_part(add || k > 0, lhs, rhs, parallelism);
        }
    }

    /// As `write`, with sums in one go.
    fn write_part(
        &mut self,
        accumulate: bool,
        lhs: Matrix<'_>,
        rhs: Matrix<'_>,
        parallelism: Parallelism,
    ) {
        self.check_shapes(lhs, rhs);
        // SAFETY: each matrix was checked to lie inside its slice when it was made, the shapes fit (checked above),
        // and `self` is the only access to its elements: it came from an exclusive borrow, or from
        // `SharedBuffer::matrix`, whose caller vouches for it. Strides are at most a slice's length, so fit isize.
        unsafe {
            gemm::gemm(
                self.rows,
                self.cols,
                lhs.cols,
                self.data,
                1,
                self.row_stride as isize,
                accumulate,
                lhs.data.as_ptr(),
                lhs.col_stride as isize,
                lhs.row_stride as isize,
                rhs.data.as_ptr(),
                rhs.col_stride as isize,
                rhs.row_stride as isize,
                1.0,
                1.0,
                false,
                false,
                false,
                parallelism,
            );
        }
    }
}

/// `lhs * rhs` row by row, on the calling thread.
pub(crate) fn product(lhs: Matrix<'_>, rhs: Matrix<'_>) -> Vec<f32> {
    new_product(lhs, rhs, |out| out.set_product(lhs, rhs))
}

/// `lhs * rhs` row by row, on all threads of the current pool if that is worth it.
pub(crate) fn parallel_product(lhs: Matrix<'_>, rhs: Matrix<'_>) -> Vec<f32> {
    new_product(lhs, rhs, |out| out.parallel_product(false, lhs, rhs))
}

fn new_product(
    lhs: Matrix<'_>,
    rhs: Matrix<'_>,
    write: impl FnOnce(&mut MatrixMut<'_>),
) -> Vec<f32> {
    let (rows, cols) = (lhs.rows, rhs.cols);
    let mut values = Vec::<f32>::with_capacity(rows * cols);
    write(&mut MatrixMut {
        data: values.as_mut_ptr(),
        rows,
        cols,
        row_stride: cols,
        lifetime: PhantomData,
    });
    // SAFETY: a product that does not add reads nothing and writes every element, `rows * cols` in a row.
    unsafe { values.set_len(rows * cols) };
    values
}

/// A buffer of which several threads write disjoint strided matrices, such as the heads of `(t, heads, d)`.
pub(crate) struct SharedBuffer<'a> {
    data: *mut f32,
    len: usize,
    lifetime: PhantomData<&'a mut [f32]>,
}

// SAFETY: the only access is through `matrix`, whose callers keep the matrices in use at one time disjoint.
unsafe impl Sync for SharedBuffer<'_> {}

impl<'a> SharedBuffer<'a> {
    /// Borrows `data` for as long as threads write to it.
    pub(crate) fn new(data: &'a mut [f32]) -> Self {
        Self {
            data: data.as_mut_ptr(),
            len: data.len(),
            lifetime: PhantomData,
        }
    }

    /// `rows` rows of `cols` elements, `row_stride` apart, from element `start`.
    ///
    /// # Safety
    /// No other matrix in use at the same time shares an element with this one.
    pub(crate) unsafe fn matrix(
        &self,
        start: usize,
        rows: usize,
        cols: usize,
        row_stride: usize,
    ) -> MatrixMut<'_> {
        let end = start + extent(rows, cols, row_stride);
        assert!(
            end <= self.len,
            "matrix of {end} elements in a buffer of {}",
            self.len
        );
        // SAFETY: `start <= end <= len` by the check above, so the pointer stays inside the buffer.
        let data = unsafe { self.data.add(start) };
        MatrixMut {
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

#[cfg(test)]
mod tests {
    use super::{Matrix, MatrixMut, SharedBuffer};

    #[test]
    fn product_of_strided_matrices_touches_only_its_elements() {
        // a = [[1, 2], [3, 4]] inside rows of 3, b = [[5, 6], [7, 8]] stored transposed.
        let a = [1.0, 2.0, 9.0, 3.0, 4.0];
        let b = [5.0, 7.0, 6.0, 8.0];
        let mut out = [1.0f32; 7];
        let (a, b) = (Matrix::new(&a, 2, 2, 3), Matrix::new(&b, 2, 2, 2).t());
        MatrixMut::new(&mut out, 2, 2, 4).set_product(a, b);
        assert_eq!(out, [19.0, 22.0, 1.0, 1.0, 43.0, 50.0, 1.0]);
        MatrixMut::new(&mut out, 2, 2, 4).add_product(a, b);
        assert_eq!(out, [38.0, 44.0, 1.0, 1.0, 86.0, 100.0, 1.0]);
    }

    #[test]
    #[should_panic(expected = "in a buffer of 7")]
    fn a_matrix_beyond_a_shared_buffer_is_refused() {
        let mut out = [0f32; 7];
        let shared = SharedBuffer::new(&mut out);
        // SAFETY: it is the only matrix.
        let _ = unsafe { shared.matrix(1, 2, 3, 4) };
    }
}
