//! Lanes of 32 bits, which the kernels multiply: one f32, or two bf16 that follow each other along `k`.

use super::packing::Layout;
use crate::lines::{LANES, Line};
use crate::matrix::Matrix;
use half::{bf16, f16};
use std::arch::x86_64::{
    __m256bh, __m256i, __m512, __m512bh, __m512i, _mm256_loadu_si256, _mm256_maskz_loadu_epi16,
    _mm512_castps_si512, _mm512_castsi512_ps, _mm512_cvtepu16_epi32, _mm512_cvtne2ps_pbh,
    _mm512_cvtneps_pbh, _mm512_cvtph_ps, _mm512_loadu_si512, _mm512_maskz_loadu_epi16,
    _mm512_maskz_loadu_epi32, _mm512_or_si512, _mm512_setzero_si512, _mm512_slli_epi32,
    _mm512_sub_ps,
};
use std::ops::Range;

/// Types of values that lanes are made from.
///
/// # Safety
/// All functions need AVX-512, and those of pairs AVX512-BF16; `place` must point to `len` values.
pub(crate) trait Lanes: Copy {
    /// Up to 16 values in f32, then zeros.
    unsafe fn terms(place: *const Self, len: usize) -> __m512i;

    /// Up to 32 values in pairs of bf16, then zeros: bf16 number `part` of the sum of them that each value is.
    unsafe fn pairs(place: *const Self, len: usize, part: usize) -> __m512i;

    /// Pairs of bf16, then zeros, of up to 16 values from `place` and as many from `next`, or zeros if that is null.
    unsafe fn interleaved(
        place: *const Self,
        next: *const Self,
        len: usize,
        part: usize,
    ) -> __m512i;
}

impl Lanes for f32 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn terms(place: *const Self, len: usize) -> __m512i {
        // SAFETY: the lanes of the mask are the values.
        unsafe {
            match len {
                LANES.. => _mm512_loadu_si512(place.cast()),
                _ => _mm512_maskz_loadu_epi32((1u16 << len) - 1, place.cast()),
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn pairs(place: *const Self, len: usize, part: usize) -> __m512i {
        // SAFETY: as promised by the caller; a half without values is not read.
        unsafe {
            let first = Self::terms(place, len.min(LANES));
            let next = Self::terms(place.wrapping_add(LANES), len.saturating_sub(LANES));
            let [first, next] = [part_of(first, part), part_of(next, part)];
            std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(next, first))
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn interleaved(
        place: *const Self,
        next: *const Self,
        len: usize,
        part: usize,
    ) -> __m512i {
        // SAFETY: as promised by the caller.
        unsafe {
            let first = rounded(part_of(Self::terms(place, len), part));
            let next = match next.is_null() {
                true => _mm512_setzero_si512(),
                false => rounded(part_of(Self::terms(next, len), part)),
            };
            paired(first, next)
        }
    }
}

/// What number `part` of the bf16 that add up to each f32 is rounded from: the value less the parts before.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn part_of(values: __m512i, part: usize) -> __m512 {
    let mut rest = _mm512_castsi512_ps(values);
    for _ in 0..part {
        let before = _mm512_slli_epi32::<16>(rounded(rest));
        rest = _mm512_sub_ps(rest, _mm512_castsi512_ps(before));
    }
    rest
}

/// The nearest bf16, in the low bits of each lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn rounded(values: __m512) -> __m512i {
    // SAFETY: both types are 16 numbers of 16 bits.
    _mm512_cvtepu16_epi32(unsafe {
        std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(values))
    })
}

/// Pairs of numbers in the low bits of each lane.
#[inline]
#[target_feature(enable = "avx512f")]
fn paired(first: __m512i, next: __m512i) -> __m512i {
    _mm512_or_si512(first, _mm512_slli_epi32::<16>(next))
}

/// Up to 16 numbers of 16 bits, then zeros, in the low bits of each lane.
///
/// # Safety
/// There are `len` numbers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn load16(place: *const u16, len: usize) -> __m512i {
    // SAFETY: the lanes of the mask are the numbers.
    _mm512_cvtepu16_epi32(unsafe {
        match len {
            LANES.. => _mm256_loadu_si256(place.cast()),
            _ => _mm256_maskz_loadu_epi16((1u16 << len) - 1, place.cast()),
        }
    })
}

impl Lanes for bf16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn terms(place: *const Self, len: usize) -> __m512i {
        // SAFETY: as promised by the caller.
        _mm512_slli_epi32::<16>(unsafe { load16(place.cast(), len) })
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn pairs(place: *const Self, len: usize, _part: usize) -> __m512i {
        // SAFETY: the lanes of the mask are the values.
        unsafe {
            match len {
                32.. => _mm512_loadu_si512(place.cast()),
                _ => _mm512_maskz_loadu_epi16((1u32 << len) - 1, place.cast()),
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn interleaved(
        place: *const Self,
        next: *const Self,
        len: usize,
        _part: usize,
    ) -> __m512i {
        // SAFETY: as promised by the caller.
        unsafe {
            let first = load16(place.cast(), len);
            match next.is_null() {
                true => first,
                false => paired(first, load16(next.cast(), len)),
            }
        }
    }
}

impl Lanes for f16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn terms(place: *const Self, len: usize) -> __m512i {
        // SAFETY: as promised by the caller.
        _mm512_castps_si512(_mm512_cvtph_ps(unsafe {
            match len {
                LANES.. => _mm256_loadu_si256(place.cast()),
                _ => _mm256_maskz_loadu_epi16((1u16 << len) - 1, place.cast()),
            }
        }))
    }

    /// No kernel takes f16 as bf16: they have more bits.
    unsafe fn pairs(_place: *const Self, _len: usize, _part: usize) -> __m512i {
        unreachable!("f16 are multiplied as f32")
    }

    unsafe fn interleaved(
        _place: *const Self,
        _next: *const Self,
        _len: usize,
        _part: usize,
    ) -> __m512i {
        unreachable!("f16 are multiplied as f32")
    }
}

/// How values become lanes, and these panels: see [`super::packing`].
pub(super) trait Format {
    /// Values of a lane, along `k`.
    const TERMS: usize;
    /// Lanes for each value.
    const PARTS: usize;

    /// Writes panels of the rows `vectors` of `source` over `k` to `lines`. The right matrix is to be given transposed.
    ///
    /// # Safety
    /// The processor can make such lanes.
    unsafe fn pack<T: Lanes>(
        source: Matrix<'_, T>,
        vectors: Range<usize>,
        k: Range<usize>,
        layout: Layout,
        lines: &mut [Line],
    );
}

/// f32.
pub(super) struct Terms;

/// Two bf16, of sums of `PARTS` of them.
pub(super) struct Pairs<const PARTS: usize>;
