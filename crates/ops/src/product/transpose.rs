//! The transpose of 16 x 16 lanes in registers.

use crate::cpu::lines::LANES;
use std::arch::x86_64::{
    __m512i, _mm512_setzero_si512, _mm512_shuffle_i32x4, _mm512_unpackhi_epi32,
    _mm512_unpackhi_epi64, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};

/// The transpose: pairs of lanes, pairs of those, then groups of four lanes change places.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn transposed(rows: &[__m512i; LANES]) -> [__m512i; LANES] {
    let mut quads = [_mm512_setzero_si512(); LANES];
    for i in (0..LANES).step_by(4) {
        let (a, b, c, d) = (rows[i], rows[i + 1], rows[i + 2], rows[i + 3]);
        let ab = [_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)];
        let cd = [_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d)];
        for half in 0..2 {
            quads[i + 2 * half] = _mm512_unpacklo_epi64(ab[half], cd[half]);
            quads[i + 2 * half + 1] = _mm512_unpackhi_epi64(ab[half], cd[half]);
        }
    }
    // Group g of four lanes of `quads[4 i + j]` holds column 4 g + j of rows 4 i to 4 i + 3.
    let mut columns = [_mm512_setzero_si512(); LANES];
    for j in 0..4 {
        let (a, b, c, d) = (quads[j], quads[j + 4], quads[j + 8], quads[j + 12]);
        let even = [
            _mm512_shuffle_i32x4::<0x88>(a, b),
            _mm512_shuffle_i32x4::<0x88>(c, d),
        ];
        let odd = [
            _mm512_shuffle_i32x4::<0xdd>(a, b),
            _mm512_shuffle_i32x4::<0xdd>(c, d),
        ];
        columns[j] = _mm512_shuffle_i32x4::<0x88>(even[0], even[1]);
        columns[j + 4] = _mm512_shuffle_i32x4::<0x88>(odd[0], odd[1]);
        columns[j + 8] = _mm512_shuffle_i32x4::<0xdd>(even[0], even[1]);
        columns[j + 12] = _mm512_shuffle_i32x4::<0xdd>(odd[0], odd[1]);
    }
    columns
}
