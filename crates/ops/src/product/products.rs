//! Products of strided matrices inside larger buffers: large ones by [`crate::product::kernels`] where the processor allows, the others by the
//! `gemm` crate, for which bf16 and f16 are widened.
//!
//! Both cut the rows and columns of a product among threads, never the sum over `k`: the bits are the same for any number of
//! threads. A sum over `k` is made of sums of few terms, whose rounding errors stay smaller than those of one long sum.

use super::factors::Factors;
use super::few_rows::few_rows_product;
#[cfg(target_arch = "x86_64")]
use super::kernels;
use super::matrix::{Addend, Matrix, MatrixMut, PARALLEL_MULTIPLICATIONS, SUM_LEN};
use crate::cpu::chunks::for_each_chunk;
use crate::cpu::element::Element;
use crate::cpu::filled::zeros;
use crate::cpu::half_precision::{add_values, widened};
use candle_core::{CpuStorageRef, DType};
use gemm::Parallelism;
use std::borrow::Cow;
use std::marker::PhantomData;

/// The values in f32, copied only if they are of another type.
fn in_f32<T: Element>(values: &[T]) -> Cow<'_, [f32]> {
    match T::cpu_storage_ref(values) {
        CpuStorageRef::F32(values) => Cow::Borrowed(values),
        _ => Cow::Owned(widened(values)),
    }
}

/// A pointer to rows of which each thread uses its own.
struct SendPtr<T>(*mut T);

// SAFETY: threads write values that may go to other threads, each to rows of its own, as whoever uses it vouches for.
unsafe impl<T: Send> Sync for SendPtr<T> {}

impl<T> SendPtr<T> {
    fn get(&self) -> *mut T {
        self.0
    }
}

impl<Out: Element> MatrixMut<'_, Out> {
    /// `self = addend + sum of lhs * rhs`, rounded once, of at least one pair of `(lhs, rhs)`; on all threads of the current pool if that is
    /// worth it.
    pub(crate) fn parallel_product<T: Element>(
        &mut self,
        addend: Addend<'_, Out>,
        factors: &[Factors<'_, T>],
    ) {
        for Factors { lhs, rhs, .. } in factors {
            self.check_shapes(*lhs, *rhs);
        }
        match addend {
            Addend::Bias(bias) => assert_eq!(bias.len(), self.cols),
            Addend::Values(values) => assert_eq!(values.len(), self.rows * self.cols),
            Addend::Nothing | Addend::Result => {}
        }
        if let Some(mut sums) = few_rows_product(factors) {
            return self.put_sums(addend, &mut sums);
        }
        #[cfg(target_arch = "x86_64")]
        if kernels::is_worth_it::<T>(self.rows, self.cols)
            && factors.iter().any(|factors| factors.lhs.cols > 0)
        {
            // SAFETY: the processor can, the shapes fit, and this is the only access to the elements.
            return unsafe { kernels::product(self, addend, factors) };
        }
        self.gemm_product(addend, factors);
    }

    /// As [`Self::parallel_product`], by the `gemm` crate.
    pub(crate) fn gemm_product<T: Element>(
        &mut self,
        addend: Addend<'_, Out>,
        factors: &[Factors<'_, T>],
    ) {
        let multiplications =
            |factors: &Factors<'_, T>| factors.lhs.rows * factors.lhs.cols * factors.rhs.cols;
        let multiplications: usize = factors.iter().map(multiplications).sum();
        let parallelism = match rayon::current_num_threads() {
            threads if threads > 1 && multiplications > PARALLEL_MULTIPLICATIONS => {
                Parallelism::Rayon(threads)
            }
            _ => Parallelism::None,
        };
        let add = |sums: &mut MatrixMut<'_>, add: bool| {
            for (i, Factors { lhs, rhs, .. }) in factors.iter().enumerate() {
                let [l, r] = [lhs.data, rhs.data].map(in_f32);
                sums.write(add || i > 0, lhs.with(&l), rhs.with(&r), parallelism);
            }
        };
        if Out::DTYPE == DType::F32 && matches!(addend, Addend::Nothing | Addend::Result) {
            let mut out = MatrixMut {
                data: self.data.cast(),
                rows: self.rows,
                cols: self.cols,
                row_stride: self.row_stride,
                lifetime: PhantomData,
            };
            return add(&mut out, matches!(addend, Addend::Result));
        }
        let (rows, cols) = (self.rows, self.cols);
        let mut sums = zeros(rows * cols);
        add(&mut MatrixMut::new(&mut sums, rows, cols, cols), false);
        self.put_sums(addend, &mut sums);
    }

    /// `self = addend + sums`, rounded once, of sums (rows, cols).
    pub(crate) fn put_sums(&mut self, addend: Addend<'_, Out>, sums: &mut [f32]) {
        let cols = self.cols;
        let (data, row_stride, work) = (SendPtr(self.data), self.row_stride, sums.len());
        for_each_chunk(sums, cols, work, |row, sums| {
            // SAFETY: the row lies inside this matrix, the only access to its elements, and each is one task's.
            let place = unsafe { data.get().add(row * row_stride) };
            // SAFETY: as above; what is to be added was written before.
            let values = |values: *const Out| unsafe { std::slice::from_raw_parts(values, cols) };
            match addend {
                Addend::Nothing => {}
                Addend::Result => add_values(sums, values(place)),
                Addend::Values(all) => add_values(sums, &all[row * cols..][..cols]),
                Addend::Bias(bias) => add_values(sums, bias),
            }
            for (col, sum) in sums.iter().enumerate() {
                // SAFETY: as above.
                unsafe { place.add(col).write(Out::nearest(*sum)) };
            }
        });
    }

    /// The pointers are only as good as these shapes.
    fn check_shapes<T>(&self, lhs: Matrix<'_, T>, rhs: Matrix<'_, T>) {
        assert_eq!(
            (self.rows, self.cols, lhs.cols),
            (lhs.rows, rhs.cols, rhs.rows)
        );
    }
}

impl MatrixMut<'_> {
    /// `self = lhs * rhs`, or `self += lhs * rhs` if `add`, on the calling thread.
    pub(crate) fn small_product<T: Element>(
        &mut self,
        add: bool,
        lhs: Matrix<'_, T>,
        rhs: Matrix<'_>,
    ) {
        if let CpuStorageRef::F32(values) = T::cpu_storage_ref(lhs.data) {
            return self.write(add, lhs.with(values), rhs, Parallelism::None);
        }
        let place = |i: usize| i / lhs.cols * lhs.row_stride + i % lhs.cols * lhs.col_stride;
        let values: Vec<f32> = (0..lhs.rows * lhs.cols)
            .map(|i| lhs.data[place(i)].widen())
            .collect();
        let lhs = Matrix::new(&values, lhs.rows, lhs.cols, lhs.cols);
        self.write(add, lhs, rhs, Parallelism::None);
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
        // and `self` is the only access to its elements. Strides are at most a slice's length, so fit isize.
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

/// `addend + sum of lhs * rhs` of at least one pair, row by row and rounded once, on all threads of the current pool if that is
/// worth it. There is no result yet to be added.
pub(crate) fn parallel_product<T: Element, Out: Element>(
    addend: Addend<'_, Out>,
    factors: &[Factors<'_, T>],
) -> Vec<Out> {
    assert!(!matches!(addend, Addend::Result));
    let (rows, cols) = (factors[0].lhs.rows, factors[0].rhs.cols);
    new_product(rows, cols, |out| out.parallel_product(addend, factors))
}

pub(crate) fn new_product<Out: Element>(
    rows: usize,
    cols: usize,
    write: impl FnOnce(&mut MatrixMut<'_, Out>),
) -> Vec<Out> {
    let mut values = Vec::<Out>::with_capacity(rows * cols);
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

#[cfg(test)]
mod tests {
    use super::{Matrix, MatrixMut};

    #[test]
    fn product_of_strided_matrices_touches_only_its_elements() {
        // a = [[1, 2], [3, 4]] inside rows of 3, b = [[5, 6], [7, 8]] stored transposed.
        let a = [1.0f32, 2.0, 9.0, 3.0, 4.0];
        let b = [5.0, 7.0, 6.0, 8.0];
        let mut out = [1.0f32; 7];
        let (a, b) = (Matrix::new(&a, 2, 2, 3), Matrix::new(&b, 2, 2, 2).t());
        MatrixMut::new(&mut out, 2, 2, 4).small_product(false, a, b);
        assert_eq!(out, [19.0, 22.0, 1.0, 1.0, 43.0, 50.0, 1.0]);
        MatrixMut::new(&mut out, 2, 2, 4).small_product(true, a, b);
        assert_eq!(out, [38.0, 44.0, 1.0, 1.0, 86.0, 100.0, 1.0]);
    }
}
