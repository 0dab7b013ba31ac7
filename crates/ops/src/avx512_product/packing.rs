//! Copying the parts of two matrices that are about to be multiplied into the order in which they are read.
//!
//! A panel is a few vectors, rows of the left matrix or columns of the right one, over a range of `k`: for each `k` one line
//! per 16 vectors. What a line has beyond the matrix or the panel is not used and may be anything.

use crate::matrix::Matrix;
use std::arch::x86_64::{
    __m512, _mm512_castpd_ps, _mm512_castps_pd, _mm512_loadu_ps, _mm512_maskz_loadu_ps,
    _mm512_setzero_ps, _mm512_shuffle_f32x4, _mm512_store_ps, _mm512_unpackhi_pd,
    _mm512_unpackhi_ps, _mm512_unpacklo_pd, _mm512_unpacklo_ps,
};
use std::ops::Range;

/// Floats of a line.
pub(super) const LANES: usize = 16;

/// One cache line, and one AVX-512 register.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line(pub(super) [f32; LANES]);

impl Line {
    pub(super) const ZERO: Line = Line([0.0; LANES]);
}

/// Writes panels of `width` of the rows `vectors` of `source` to `lines`, which has room for exactly them. The right matrix is
/// to be given transposed. The processor must have AVX-512.
pub(super) fn pack(
    source: Matrix<'_>,
    vectors: Range<usize>,
    k: Range<usize>,
    width: usize,
    lines: &mut [Line],
) {
    let lines_per_k = width.div_ceil(LANES);
    if source.col_stride != 1 {
        return copy_panels(source, vectors, k, width, lines);
    }
    let panels = lines.chunks_exact_mut(lines_per_k * k.len());
    for (start, lines) in vectors.clone().step_by(width).zip(panels) {
        let end = vectors.end.min(start + width);
        for (part, first) in (start..end).step_by(LANES).enumerate() {
            let vectors = first..end.min(first + LANES);
            // SAFETY: this product is used only where there is AVX-512.
            unsafe { transpose(source, vectors, k.clone(), &mut lines[part..], lines_per_k) };
        }
    }
}

/// Vectors that lie side by side: a copy for each `k`, of all panels at once so that memory is read in order.
fn copy_panels(
    source: Matrix<'_>,
    vectors: Range<usize>,
    k: Range<usize>,
    width: usize,
    lines: &mut [Line],
) {
    let lines_per_k = width.div_ceil(LANES);
    let panel_lines = lines_per_k * k.len();
    for (row, k) in k.enumerate() {
        let values = &source.data[k * source.col_stride..][vectors.clone()];
        let panels = lines.chunks_exact_mut(panel_lines);
        for (start, lines) in (0..values.len()).step_by(width).zip(panels) {
            let lines = &mut lines[row * lines_per_k..][..lines_per_k];
            for (part, line) in lines.iter_mut().enumerate() {
                let rest = values.get(start + part * LANES..).unwrap_or_default();
                match rest.first_chunk::<LANES>() {
                    Some(values) => line.0 = *values,
                    None => line.0[..rest.len()].copy_from_slice(rest),
                }
            }
        }
    }
}

/// Up to 16 vectors that are contiguous in `k`, to every `step`-th of `lines`: tiles are transposed in registers.
#[target_feature(enable = "avx512f")]
fn transpose(
    source: Matrix<'_>,
    vectors: Range<usize>,
    k: Range<usize>,
    lines: &mut [Line],
    step: usize,
) {
    let rows = &source.data[vectors.start * source.row_stride..];
    let last = (vectors.len() - 1) * source.row_stride;
    assert!(vectors.len() <= LANES && last + k.end <= rows.len());
    for start in k.clone().step_by(LANES) {
        let len = (k.end - start).min(LANES);
        let mask = ((1u32 << len) - 1) as u16;
        let mut tile = [_mm512_setzero_ps(); LANES];
        for (row, vector) in tile.iter_mut().enumerate().take(vectors.len()) {
            let place = rows[row * source.row_stride + start..].as_ptr();
            // SAFETY: the lanes of the mask end at `last + k.end` at most, which was checked.
            *vector = unsafe {
                match len {
                    LANES => _mm512_loadu_ps(place),
                    _ => _mm512_maskz_loadu_ps(mask, place),
                }
            };
        }
        let lines = lines[(start - k.start) * step..].iter_mut().step_by(step);
        for (line, vector) in lines.zip(transposed(&tile)).take(len) {
            // SAFETY: a line is 64 bytes, aligned.
            unsafe { _mm512_store_ps(line.0.as_mut_ptr(), vector) };
        }
    }
}

/// The transpose of 16 x 16 floats: pairs of floats, pairs of those, then groups of four lanes change places.
#[inline]
#[target_feature(enable = "avx512f")]
fn transposed(rows: &[__m512; LANES]) -> [__m512; LANES] {
    let mut quads = [_mm512_setzero_ps(); LANES];
    for i in (0..LANES).step_by(4) {
        let (a, b, c, d) = (rows[i], rows[i + 1], rows[i + 2], rows[i + 3]);
        let ab = [_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)].map(|x| _mm512_castps_pd(x));
        let cd = [_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)].map(|x| _mm512_castps_pd(x));
        for half in 0..2 {
            quads[i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab[half], cd[half]));
            quads[i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab[half], cd[half]));
        }
    }
    // Group g of four lanes of `quads[4 i + j]` holds column 4 g + j of rows 4 i to 4 i + 3.
    let mut columns = [_mm512_setzero_ps(); LANES];
    for j in 0..4 {
        let (a, b, c, d) = (quads[j], quads[j + 4], quads[j + 8], quads[j + 12]);
        let even = [
            _mm512_shuffle_f32x4::<0x88>(a, b),
            _mm512_shuffle_f32x4::<0x88>(c, d),
        ];
        let odd = [
            _mm512_shuffle_f32x4::<0xdd>(a, b),
            _mm512_shuffle_f32x4::<0xdd>(c, d),
        ];
        columns[j] = _mm512_shuffle_f32x4::<0x88>(even[0], even[1]);
        columns[j + 4] = _mm512_shuffle_f32x4::<0x88>(odd[0], odd[1]);
        columns[j + 8] = _mm512_shuffle_f32x4::<0xdd>(even[0], even[1]);
        columns[j + 12] = _mm512_shuffle_f32x4::<0xdd>(odd[0], odd[1]);
    }
    columns
}

#[cfg(test)]
mod tests {
    use super::{LANES, Line, pack};
    use crate::matrix::Matrix;

    /// What `pack` promises, element by element.
    fn check(source: Matrix<'_>, value: impl Fn(usize, usize) -> f32, width: usize) {
        let (vectors, ks) = (3..48, 2..39);
        let lines_per_k = width.div_ceil(LANES);
        let panel_lines = ks.len() * lines_per_k;
        let num_panels = vectors.len().div_ceil(width);
        let mut lines = vec![Line([f32::NAN; LANES]); num_panels * panel_lines];
        pack(source, vectors.clone(), ks.clone(), width, &mut lines);
        for (i, vector) in vectors.enumerate() {
            let (panel, lane) = (i / width, i % width);
            for (row, k) in ks.clone().enumerate() {
                let line = panel * panel_lines + row * lines_per_k + lane / LANES;
                assert_eq!(
                    lines[line].0[lane % LANES],
                    value(vector, k),
                    "vector {vector}, k {k}"
                );
            }
        }
    }

    #[test]
    fn every_element_finds_its_place() {
        if !is_x86_feature_detected!("avx512f") {
            return;
        }
        let value = |row: usize, col: usize| (row * 100 + col) as f32;
        let values: Vec<f32> = (0..50 * 53).map(|i| value(i / 53, i % 53)).collect();
        for width in [14, 32] {
            check(Matrix::new(&values, 50, 50, 53), value, width);
            check(
                Matrix::new(&values, 50, 50, 53).t(),
                |i, k| value(k, i),
                width,
            );
        }
    }
}
