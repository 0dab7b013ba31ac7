//! The tile of a product that is summed in registers: 14 rows by 32 columns, 28 of the 32 registers of AVX-512. Each `k`
//! loads two lines of the right matrix and broadcasts 14 elements of the left one, for 28 multiply-adds.

use super::packing::{LANES, Line};
use std::arch::x86_64::{
    _MM_HINT_T0, _mm_prefetch, _mm512_add_ps, _mm512_fmadd_ps, _mm512_load_ps,
    _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps,
};

/// Rows of a tile: a panel of the left matrix, of one line per `k` whose last two floats are not used.
pub(super) const PANEL_ROWS: usize = 14;
/// Columns of a tile: a panel of the right matrix, of two lines per `k`.
pub(super) const PANEL_COLS: usize = 2 * LANES;

/// A part of the result: 1 to 14 rows, 1 to 32 columns.
pub(super) struct Tile {
    pub(super) data: *mut f32,
    pub(super) row_stride: usize,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

type Kernel = unsafe fn(&Tile, bool, &[Line], &[Line]);

macro_rules! kernels {
    ($vectors:literal: $($rows:literal)*) => { [$(multiply::<$rows, $vectors> as Kernel),*] };
}

const NARROW: [Kernel; PANEL_ROWS] = kernels!(1: 1 2 3 4 5 6 7 8 9 10 11 12 13 14);
const WIDE: [Kernel; PANEL_ROWS] = kernels!(2: 1 2 3 4 5 6 7 8 9 10 11 12 13 14);

/// `tile = lhs * rhs`, or `tile += lhs * rhs` if `add`, of packed panels.
///
/// # Safety
/// The processor has AVX-512, the elements of the tile exist and nobody else uses them meanwhile.
pub(super) unsafe fn multiply_tile(tile: Tile, add: bool, lhs: &[Line], rhs: &[Line]) {
    let kernels = if tile.cols > LANES { &WIDE } else { &NARROW };
    // SAFETY: as promised by the caller; the kernel is the one for the tile's rows and columns.
    unsafe { kernels[tile.rows - 1](&tile, add, lhs, rhs) }
}

/// For a tile of `ROWS` rows and more than `16 * (VECTORS - 1)` columns.
///
/// # Safety
/// As for [`multiply_tile`].
#[target_feature(enable = "avx512f")]
unsafe fn multiply<const ROWS: usize, const VECTORS: usize>(
    tile: &Tile,
    add: bool,
    lhs: &[Line],
    rhs: &[Line],
) {
    let place = |row: usize, v: usize| tile.data.wrapping_add(row * tile.row_stride + v * LANES);
    for row in 0..ROWS {
        for v in 0..VECTORS {
            _mm_prefetch::<_MM_HINT_T0>(place(row, v).cast());
        }
    }
    let mut sums = [[_mm512_setzero_ps(); VECTORS]; ROWS];
    for (lhs, rhs) in lhs.iter().zip(rhs.as_chunks::<2>().0) {
        let mut vectors = [_mm512_setzero_ps(); VECTORS];
        for (vector, line) in vectors.iter_mut().zip(rhs) {
            // SAFETY: a line is 64 bytes, aligned.
            *vector = unsafe { _mm512_load_ps(line.0.as_ptr()) };
        }
        for (sums, factor) in sums.iter_mut().zip(lhs.0) {
            let factor = _mm512_set1_ps(factor);
            for (sum, vector) in sums.iter_mut().zip(vectors) {
                *sum = _mm512_fmadd_ps(factor, vector, *sum);
            }
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        for (v, sum) in sums.iter().enumerate() {
            let mask = ((1u32 << (tile.cols - v * LANES).min(LANES)) - 1) as u16;
            // SAFETY: the lanes of the mask are elements of the tile, which the caller lets us use.
            unsafe {
                let sum = match add {
                    true => _mm512_add_ps(_mm512_maskz_loadu_ps(mask, place(row, v)), *sum),
                    false => *sum,
                };
                _mm512_mask_storeu_ps(place(row, v), mask, sum);
            }
        }
    }
}
