//! Products of large matrices by each kernel, against sums in f64 and against each other.

use super::fill;
use crate::cpu::element::Element;
use crate::cpu::lines::{Line, floats};
use crate::cpu::processor::{has_amx, has_avx512, has_avx512_bf16};
use crate::product::amx::Amx;
use crate::product::blocks::multiply;
use crate::product::factors::Factors;
use crate::product::kernel::{Kernel, ROW_LINES};
use crate::product::matrix::{Addend, Matrix, MatrixMut};
use crate::product::packing::Panel;
use crate::product::panels::Panels;
use crate::product::registers::{Dots, MultiplyAdds};
use crate::product::store::{Store, Target};
use crate::settings::product_choice::ProductChoice;
use half::{bf16, f16};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

#[path = "emulated.rs"]
mod emulated;

use emulated::TilePairs;

/// What [`Amx`] computes, whether the processor has it or not.
struct Emulated<const PARTS: usize>;

impl<const PARTS: usize> Kernel for Emulated<PARTS> {
    type Format = TilePairs<PARTS>;

    const ROWS: usize = Amx::<PARTS>::ROWS;
    const BY_ROWS: bool = Amx::<PARTS>::BY_ROWS;
    const READS_ROWS: bool = Amx::<PARTS>::READS_ROWS;
    const LANES_STEP: usize = Amx::<PARTS>::LANES_STEP;
    const SUM_LEN: usize = Amx::<PARTS>::SUM_LEN;

    unsafe fn multiply<const STAYS_LEFT: bool>(
        sums: &mut [Line],
        row_lines: usize,
        (num_rows, _): (usize, usize),
        add: bool,
        lhs: Panel<'_>,
        rhs: Panel<'_>,
        mut aside: impl FnMut(usize, usize),
    ) {
        // In steps of any size.
        (1..=3).for_each(|done| aside(done, 7));
        emulated::multiply::<PARTS>(sums, row_lines, num_rows, add, lhs, rhs);
    }
}

impl<Out: Element> Target<'_, Out> {
    /// Stores rows of sums on any processor.
    ///
    /// # Safety
    /// That of [`Store`].
    unsafe fn store_anywhere<const IS_FIRST: bool, const IS_LAST: bool>(
        &self,
        rows: Range<usize>,
        cols: &Range<usize>,
        sums: &[Line],
    ) {
        for (row, sums) in rows.zip(sums.as_chunks::<ROW_LINES>().0) {
            for (col, sum) in cols.clone().zip(floats(sums)) {
                let out = self.out.data.wrapping_add(row * self.out.row_stride + col);
                let partial = self.partial.map(|partial| {
                    partial.wrapping_add(row * self.cols.len() + col - self.cols.start)
                });
                // SAFETY: the element lies in the result, only ours as promised by the caller; it, or the memory of the sums, holds a value
                // where it is read.
                unsafe {
                    let added = match (partial, self.addend) {
                        (Some(partial), _) if !IS_FIRST => partial.read(),
                        (None, _) if !IS_FIRST => out.read().widen(),
                        // Added to 0, it leaves the sign.
                        (_, Addend::Nothing) => -0.0,
                        (_, Addend::Result) => out.read().widen(),
                        (_, Addend::Values(values)) => values[row * self.out.cols + col].widen(),
                        (_, Addend::Bias(bias)) => bias[col],
                    };
                    match partial {
                        Some(partial) if !IS_LAST => partial.write(sum + added),
                        _ => out.write(Out::nearest(sum + added)),
                    }
                }
            }
        }
    }

    /// As [`Target::storing`], on any processor.
    pub(crate) fn storing_anywhere(&self, is_first: bool, is_last: bool) -> Store<Self> {
        match (is_first, is_last) {
            (true, true) => Self::store_anywhere::<true, true>,
            (true, false) => Self::store_anywhere::<true, false>,
            (false, true) => Self::store_anywhere::<false, true>,
            (false, false) => Self::store_anywhere::<false, false>,
        }
    }
}

/// Numbers in -1..1, of `T`.
fn values<T: Element>(len: usize, seed: usize) -> Vec<T> {
    let value = |i: usize| ((i + seed) * 2_654_435_761 % 100_003) as f32 / 50_001.5 - 1.0;
    (0..len).map(|i| T::nearest(value(i))).collect()
}

/// A product of two pairs inside larger buffers, of matrices stored by rows and by columns: `error` is what factors are off by, of
/// themselves.
fn check<K: Kernel, T: Element, Out: Element>(
    (rows, cols): (usize, usize),
    num_k: [usize; 2],
    error: f64,
) {
    let lhs = num_k.map(|num_k| values::<T>(rows * num_k, num_k));
    let rhs = num_k.map(|num_k| values::<T>(num_k * cols, num_k + 7));
    let (bias, residual) = (values::<f32>(cols, 3), values::<Out>(rows * cols, 4));
    let addends = [
        Addend::Nothing,
        Addend::Result,
        Addend::Values(&residual),
        Addend::Bias(&bias),
    ];
    for (lhs_by_rows, rhs_by_rows) in [(true, true), (true, false), (false, true)] {
        let factors = [0, 1].map(|i| {
            let lhs = match lhs_by_rows {
                true => Matrix::new(&lhs[i], rows, num_k[i], num_k[i]),
                false => Matrix::new(&lhs[i], num_k[i], rows, rows).t(),
            };
            let rhs = match rhs_by_rows {
                true => Matrix::new(&rhs[i], num_k[i], cols, cols),
                false => Matrix::new(&rhs[i], cols, num_k[i], num_k[i]).t(),
            };
            Factors::new(lhs, rhs)
        });
        let (mut want, mut magnitude) = (vec![0f64; rows * cols], vec![0f64; rows * cols]);
        for Factors { lhs, rhs, .. } in &factors {
            for row in 0..rows {
                for k in 0..lhs.cols {
                    let a = lhs.data[row * lhs.row_stride + k * lhs.col_stride].widen();
                    for col in 0..cols {
                        let b = rhs.data[k * rhs.row_stride + col * rhs.col_stride].widen();
                        let term = f64::from(a) * f64::from(b);
                        want[row * cols + col] += term;
                        magnitude[row * cols + col] += term.abs();
                    }
                }
            }
        }
        for addend in addends {
            let stride = cols + 5;
            let mut out = vec![Out::nearest(0.5); rows * stride];
            let matrix = MatrixMut::new(&mut out, rows, cols, stride);
            // SAFETY: the tests ask whether the processor has the kernel's instructions, and the shapes fit.
            unsafe { multiply::<K, T, Out>(&matrix, addend, &factors) };
            // With the panels of one right matrix, of the other, and of both.
            for which in [[true, false], [false, true], [true, true]] {
                let panels = [0, 1].map(|i| {
                    let Factors { rhs, .. } = factors[i];
                    // In memory of the kernel that needs most, or in new memory, as there is too little.
                    let mut panels = Arc::new(match i {
                        0 => Panels::new::<Amx<3>>(rhs.rows, rhs.cols),
                        _ => Panels::new::<K>(rhs.rows / 2, rhs.cols),
                    });
                    let place = Arc::as_ptr(&panels);
                    // SAFETY: as above.
                    unsafe { fill::<K, T>(&mut panels, false, rhs) };
                    assert!(i > 0 || Arc::as_ptr(&panels) == place);
                    panels
                });
                let with_panels = |i: usize| Factors {
                    panels: which[i].then_some(&*panels[i]),
                    ..factors[i]
                };
                let mut same = vec![Out::nearest(0.5); rows * stride];
                let matrix = MatrixMut::new(&mut same, rows, cols, stride);
                // SAFETY: as above.
                unsafe { multiply::<K, T, Out>(&matrix, addend, &[0, 1].map(with_panels)) };
                assert!(same == out, "{which:?} of {rows} x {cols} x {num_k:?}");
            }
            for (i, got) in out.iter().enumerate() {
                let (row, col) = (i / stride, i % stride);
                let got = f64::from(got.widen());
                if col >= cols {
                    assert_eq!(got, 0.5, "beyond row {row} of {rows} x {cols} x {num_k:?}");
                    continue;
                }
                let i = row * cols + col;
                let added = f64::from(match addend {
                    Addend::Nothing => 0.0,
                    Addend::Result => 0.5,
                    Addend::Values(values) => values[i].widen(),
                    Addend::Bias(bias) => bias[col],
                });
                // Each term is rounded once for each term after it in its sum, and for each later sum.
                let num_roundings = |num_k: &usize| num_k.min(&K::SUM_LEN) + num_k / K::SUM_LEN + 2;
                let num_roundings: usize = num_k.iter().map(num_roundings).sum();
                let magnitude = magnitude[i] + added.abs();
                let bound = f64::from(f32::EPSILON) / 2.0 * num_roundings as f64 * magnitude;
                let bound = bound + 2.0 * error * magnitude;
                let want = want[i] + added;
                let nearest = |x: f64| f64::from(Out::nearest(x as f32).widen());
                assert!(
                    (nearest(want - bound)..=nearest(want + bound)).contains(&got),
                    "{row}, {col} of {rows} x {cols} x {num_k:?}: {got} {want}"
                );
            }
        }
    }
}

fn check_shapes<K: Kernel, T: Element, Out: Element>(error: f64) {
    for (extent, num_k) in [
        ((28, 28), [1, 0]),
        ((29, 49), [193, 2]),
        ((57, 65), [17, 35]),
        ((43, 1300), [40, 33]),
        ((33, 31), [1, 5000]),
    ] {
        check::<K, T, Out>(extent, num_k, error);
    }
}

#[test]
fn odd_products_by_multiply_adds() {
    if has_avx512() {
        check_shapes::<MultiplyAdds, f32, f32>(0.0);
        check_shapes::<MultiplyAdds, bf16, bf16>(0.0);
        check_shapes::<MultiplyAdds, bf16, f32>(0.0);
        check_shapes::<MultiplyAdds, f16, f16>(0.0);
    }
}

/// Tiles, and their definition on every processor.
#[test]
fn odd_products_by_tiles() {
    fn check<One: Kernel, Two: Kernel, Three: Kernel>() {
        check_shapes::<One, bf16, bf16>(0.0);
        check_shapes::<One, bf16, f32>(0.0);
        check_shapes::<Two, f32, f32>(ProductChoice::TwoParts.f32_error());
        check_shapes::<Three, f32, f32>(ProductChoice::ThreeParts.f32_error());
    }
    check::<Emulated<1>, Emulated<2>, Emulated<3>>();
    if has_amx() {
        check::<Amx<1>, Amx<2>, Amx<3>>();
    }
}

fn same_bits<const PARTS: usize, T: Element>() {
    let (rows, cols, num_k) = (45, 70, 600);
    let (mut lhs, rhs) = (values::<T>(rows * num_k, 1), values::<T>(num_k * cols, 2));
    for (i, value) in lhs.iter_mut().enumerate() {
        *value = T::nearest(value.widen() * 2f32.powi(i as i32 % 200 - 150));
    }
    let factors = [Factors::new(
        Matrix::new(&lhs, rows, num_k, num_k),
        Matrix::new(&rhs, num_k, cols, cols),
    )];
    let [mut got, mut want] = [vec![0f32; rows * cols], vec![0f32; rows * cols]];
    // SAFETY: the test asks whether the processor has AMX, and the shapes fit.
    unsafe {
        let out = |out| MatrixMut::new(out, rows, cols, cols);
        multiply::<Amx<PARTS>, T, f32>(&out(&mut got), Addend::Nothing, &factors);
        multiply::<Emulated<PARTS>, T, f32>(&out(&mut want), Addend::Nothing, &factors);
    }
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    assert_eq!(bits(got), bits(want));
}

#[test]
fn tiles_give_the_bits_of_their_definition() {
    if has_amx() {
        same_bits::<1, bf16>();
        same_bits::<2, f32>();
        same_bits::<3, f32>();
    }
}

/// Rows of a left matrix that lie in whole lines are read where they are, on as many threads as there are and on one; others are packed.
fn check_rows_in_place<K: Kernel>((rows, cols, num_k): (usize, usize, usize)) {
    let stride = num_k + 32;
    let mut lines = vec![Line([0; 16]); (rows + 1) * stride / 32 + 1];
    // SAFETY: lanes are two bf16 each, of any bits.
    let (_, all, _) = unsafe { lines.align_to_mut::<bf16>() };
    all.iter_mut()
        .zip(values::<bf16>((rows + 1) * stride, 3))
        .for_each(|(place, value)| *place = value);
    let aligned = all.to_vec();
    let rhs = values::<bf16>(cols * num_k, 5);
    let rhs = Matrix::new(&rhs, cols, num_k, num_k).t();
    let product = |lhs: Matrix<'_, bf16>| {
        let mut out = vec![0f32; rows * cols];
        // SAFETY: the processor has the instructions or they are emulated, and the shapes fit.
        unsafe {
            let out = MatrixMut::new(&mut out, rows, cols, cols);
            multiply::<K, bf16, f32>(&out, Addend::Nothing, &[Factors::new(lhs, rhs)]);
        }
        out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    let in_place = Matrix::new(&*all, rows, num_k, stride);
    assert!(Panel::of_rows(in_place, rows - 32, 32, &(0..num_k)).is_some());
    assert!(Panel::of_rows(in_place, rows - 31, 32, &(0..num_k)).is_none());
    // So that there are columns enough for each thread.
    let pool = |num_threads| {
        rayon::ThreadPoolBuilder::new()
            .num_threads(num_threads)
            .build()
    };
    let got = pool(2).unwrap().install(|| product(in_place));
    // The same, one value further.
    let mut moved = vec![Line([0; 16]); aligned.len() / 32 + 1];
    // SAFETY: as above.
    let (_, place, _) = unsafe { moved.align_to_mut::<bf16>() };
    place[1..=aligned.len()].copy_from_slice(&aligned);
    let packed = Matrix::new(&place[1..=aligned.len()], rows, num_k, stride);
    assert!(Panel::of_rows(packed, 0, 32, &(0..num_k)).is_none());
    assert!(got == product(packed), "{rows} x {cols} x {num_k}");
    for values in [in_place, packed] {
        assert!(got == pool(1).unwrap().install(|| product(values)));
    }
}

#[test]
fn rows_in_place_give_the_bits_of_packed_ones() {
    for shape in [
        (64, 64, 32),
        (33, 420, 96),
        (101, 530, 1376),
        (130, 290, 4128),
    ] {
        if has_amx() {
            check_rows_in_place::<Amx<1>>(shape);
        }
        check_rows_in_place::<Emulated<1>>(shape);
    }
}

/// A thread that waits inside a product takes up another one, whose packed matrices must not replace its own.
#[test]
fn products_that_begin_inside_others() {
    if !has_avx512() {
        return;
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build();
    pool.unwrap().install(|| {
        (0..24).into_par_iter().with_max_len(1).for_each(|i| {
            let extent = (60 + i, 1200 + 16 * (i % 5));
            check::<MultiplyAdds, f32, f32>(extent, [40 - i, 3], 0.0);
        });
    });
}

/// Six products of parts are no less exact than multiply-adds, also of factors whose sizes differ much.
#[test]
fn products_of_three_parts_are_as_exact_as_those_of_f32() {
    for (num_k, spread) in [(64, 0), (515, 0), (515, 12), (2000, 6)] {
        let [rows, cols] = [61, 66];
        let spread_out = |mut values: Vec<f32>| {
            for (i, value) in values.iter_mut().enumerate() {
                *value *= 2f32.powi((i * 7 % (2 * spread + 1)) as i32 - spread as i32);
            }
            values
        };
        let lhs = spread_out(values(rows * num_k, 5));
        let rhs = spread_out(values(num_k * cols, 11));
        let factors = [Factors::new(
            Matrix::new(&lhs, rows, num_k, num_k),
            Matrix::new(&rhs, num_k, cols, cols),
        )];
        let error = |product: &dyn Fn(&mut MatrixMut<'_>)| {
            let mut out = vec![0f32; rows * cols];
            product(&mut MatrixMut::new(&mut out, rows, cols, cols));
            let off = out.iter().enumerate().map(|(i, got)| {
                let (lhs, rhs) = (&lhs[i / cols * num_k..], &rhs[i % cols..]);
                let terms = lhs.iter().zip(rhs.iter().step_by(cols)).take(num_k);
                let want: f64 = terms.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                (f64::from(*got) - want).powi(2)
            });
            off.sum::<f64>().sqrt()
        };
        // SAFETY: the processor has the instructions or they are emulated, and the shapes fit.
        let parts = error(&|out| unsafe {
            match has_amx() {
                true => multiply::<Amx<3>, f32, f32>(out, Addend::Nothing, &factors),
                false => multiply::<Emulated<3>, f32, f32>(out, Addend::Nothing, &factors),
            }
        });
        let f32s = error(&|out| match has_avx512() {
            // SAFETY: as above.
            true => unsafe {
                multiply::<MultiplyAdds, f32, f32>(out, Addend::Nothing, &factors);
            },
            false => out.gemm_product(Addend::Nothing, &factors),
        });
        assert!(parts <= f32s, "{num_k} terms: {parts:e}, of f32 {f32s:e}");
    }
}

#[test]
fn odd_products_by_dots() {
    if has_avx512_bf16() {
        check_shapes::<Dots, bf16, bf16>(0.0);
        check_shapes::<Dots, bf16, f32>(0.0);
    }
}
