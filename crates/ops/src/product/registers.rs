//! A tile in registers of AVX-512: 14 rows by 32 columns, 28 of the 32 registers. Each lane of `k` loads two lines of the right
//! matrix and broadcasts 14 lanes of the left one, for 28 instructions that multiply and add.

use super::kernel::{COLS, Kernel, ROW_LINES};
use super::matrix::SUM_LEN;
use super::packing::{Pairs, Panel, Terms};
use crate::cpu::lines::{LANES, Line};
use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm512_add_ps, _mm512_castsi512_ps, _mm512_dpbf16_ps,
    _mm512_fmadd_ps, _mm512_load_ps, _mm512_load_si512, _mm512_set1_epi32, _mm512_setzero_ps,
    _mm512_setzero_si512, _mm512_store_ps,
};
use std::mem::transmute;

/// Rows of a tile: a panel of the left matrix, of one line per lane of `k` whose last two lanes are not used.
const ROWS: usize = 14;

/// Most bf16 that [`Dots`] sums in one go: the rounding errors of such a sum are far below those of its terms, and longer sums are
/// stored less often.
const LONG_SUM_LEN: usize = 1 << 10;

/// Multiply-adds of f32.
pub(crate) struct MultiplyAdds;

/// Pairs of products of bf16, added one after the other. Numbers below 2^-126 count as 0.
pub(crate) struct Dots;

type Multiply = unsafe fn(&mut [Line], usize, bool, &[Line], &[Line]);

macro_rules! table {
    ($name:ident, $vectors:literal: $($rows:literal)*) => { [$($name::<$rows, $vectors> as Multiply),*] };
}

macro_rules! kernel {
    ($kernel:ty, $format:ty, $sum_len:expr, $name:ident, $features:literal, $step:expr) => {
        impl Kernel for $kernel {
            type Format = $format;

            const ROWS: usize = ROWS;
            const BY_ROWS: bool = false;
            const LANES_STEP: usize = 1;
            const SUM_LEN: usize = $sum_len;

            unsafe fn multiply<const STAYS_LEFT: bool>(
                sums: &mut [Line],
                row_lines: usize,
                (rows, cols): (usize, usize),
                add: bool,
                lhs: Panel<'_>,
                rhs: Panel<'_>,
                _aside: impl FnMut(usize, usize),
            ) {
                const NARROW: [Multiply; ROWS] = table!($name, 1: 1 2 3 4 5 6 7 8 9 10 11 12 13 14);
                const WIDE: [Multiply; ROWS] = table!($name, 2: 1 2 3 4 5 6 7 8 9 10 11 12 13 14);
                let kernels = if cols > LANES { &WIDE } else { &NARROW };
                // SAFETY: as promised by the caller.
                unsafe { kernels[rows - 1](sums, row_lines, add, lhs.part(0), rhs.part(0)) }
            }
        }

        /// For a tile of `N` rows and more than `16 * (VECTORS - 1)` columns.
        #[target_feature(enable = $features)]
        unsafe fn $name<const N: usize, const VECTORS: usize>(
            tile: &mut [Line],
            row_lines: usize,
            add: bool,
            lhs: &[Line],
            rhs: &[Line],
        ) {
            let mut sums = [[_mm512_setzero_ps(); VECTORS]; N];
            for (lhs, rhs) in lhs.iter().zip(rhs.as_chunks::<ROW_LINES>().0) {
                let mut vectors = [_mm512_setzero_si512(); VECTORS];
                for (vector, line) in vectors.iter_mut().zip(rhs) {
                    // SAFETY: a line is 64 bytes, aligned.
                    *vector = unsafe { _mm512_load_si512(line.0.as_ptr().cast()) };
                }
                for (sums, factor) in sums.iter_mut().zip(lhs.0) {
                    let factor = _mm512_set1_epi32(factor as i32);
                    for (sum, vector) in sums.iter_mut().zip(vectors) {
                        *sum = $step(*sum, factor, vector);
                    }
                }
            }
            for (sums, lines) in sums.iter().zip(tile.chunks_mut(row_lines)) {
                for (sum, line) in sums.iter().zip(lines) {
                    // SAFETY: a line is 64 bytes, aligned.
                    unsafe {
                        let sum = match add {
                            true => _mm512_add_ps(_mm512_load_ps(line.0.as_ptr().cast()), *sum),
                            false => *sum,
                        };
                        _mm512_store_ps(line.0.as_mut_ptr().cast(), sum);
                    }
                }
            }
        }
    };
}

kernel!(
    MultiplyAdds,
    Terms,
    SUM_LEN,
    multiply_add,
    "avx512f",
    |sum: __m512, factor: __m512i, vector: __m512i| {
        _mm512_fmadd_ps(
            _mm512_castsi512_ps(factor),
            _mm512_castsi512_ps(vector),
            sum,
        )
    }
);

kernel!(
    Dots,
    Pairs<1>,
    LONG_SUM_LEN,
    add_dots,
    "avx512f,avx512bf16",
    |sum: __m512, factor: __m512i, vector: __m512i| {
        // SAFETY: all are 512 bits, of any value.
        let pairs = unsafe { [factor, vector].map(|x| transmute::<__m512i, __m512bh>(x)) };
        _mm512_dpbf16_ps(sum, pairs[0], pairs[1])
    }
);

const _: () = assert!(ROWS <= LANES && COLS == ROW_LINES * LANES);
