//! Lanes of 32 bits, which the kernels multiply: one f32, or two bf16 that follow each other along `k`.

#![allow(unsafe_code)]

use super::lines::LANES;
use half::{bf16, f16};
use std::arch::x86_64::{
    __m256, __m256bh, __m256i, __m512, __m512bh, __m512i, _CMP_UNORD_Q, _MM_FROUND_NO_EXC,
    _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm256_castsi256_ps, _mm256_cvtepu16_epi32,
    _mm256_cvtph_ps, _mm256_loadu_ps, _mm256_mask_storeu_epi16, _mm256_maskz_loadu_epi16,
    _mm256_slli_epi32, _mm512_add_epi32, _mm512_and_si512, _mm512_castps_si512,
    _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_cvtepi32_epi16, _mm512_cvtepu16_epi32,
    _mm512_cvtne2ps_pbh, _mm512_cvtneps_pbh, _mm512_cvtph_ps, _mm512_cvtps_ph,
    _mm512_mask_or_epi32, _mm512_mask_storeu_ps, _mm512_maskz_loadu_epi16,
    _mm512_maskz_loadu_epi32, _mm512_or_si512, _mm512_set1_epi32, _mm512_setzero_si512,
    _mm512_slli_epi32, _mm512_srli_epi32, _mm512_sub_ps,
};

/// Types of values that lanes are made from.
///
/// # Safety
/// All functions but `eight` need AVX-512, and those of pairs AVX512-BF16; `place` must point to `len` values.
pub(crate) trait Lanes: Copy {
    /// Up to 16 values in f32, then zeros.
    unsafe fn terms(place: *const Self, len: usize) -> __m512i;

    /// Eight values in f32.
    ///
    /// # Safety
    /// The processor has AVX2 and F16C, and there are so many values.
    unsafe fn eight(place: *const Self) -> __m256;

    /// Up to 32 values in pairs of bf16, then zeros: bf16 number `part` of the sum of them that each value is.
    unsafe fn pairs(place: *const Self, len: usize, part: usize) -> __m512i;

    /// Pairs of bf16, then zeros, of up to 16 values from `place` and as many from `next`, or zeros if that is null.
    unsafe fn interleaved(
        place: *const Self,
        next: *const Self,
        len: usize,
        part: usize,
    ) -> __m512i;

    /// Writes what is nearest to each of up to 16 numbers, as [`crate::cpu::element::Element::nearest`], to places that need not hold values
    /// yet and that nobody else uses.
    unsafe fn store(place: *mut Self, len: usize, values: __m512);
}

impl Lanes for f32 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn terms(place: *const Self, len: usize) -> __m512i {
        // SAFETY: the lanes of the mask are the values.
        unsafe { _mm512_maskz_loadu_epi32(first_of_16(len), place.cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn eight(place: *const Self) -> __m256 {
        // SAFETY: as promised by the caller.
        unsafe { _mm256_loadu_ps(place) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn pairs(place: *const Self, len: usize, part: usize) -> __m512i {
        // SAFETY: as promised by the caller; a half without values is not read.
        unsafe {
            let first = Self::terms(place, len);
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

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn store(place: *mut Self, len: usize, values: __m512) {
        // SAFETY: the lanes of the mask are the values.
        unsafe { _mm512_mask_storeu_ps(place, first_of_16(len), values) };
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

/// The mask of up to 16 lanes.
#[inline(always)]
fn first_of_16(len: usize) -> u16 {
    ((1u32 << len.min(LANES)) - 1) as u16
}

/// Up to 16 numbers of 16 bits, then zeros, in the low bits of each lane.
///
/// # Safety
/// There are `len` numbers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn load16(place: *const u16, len: usize) -> __m512i {
    // SAFETY: the lanes of the mask are the numbers.
    _mm512_cvtepu16_epi32(unsafe { _mm256_maskz_loadu_epi16(first_of_16(len), place.cast()) })
}

impl Lanes for bf16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn terms(place: *const Self, len: usize) -> __m512i {
        // SAFETY: as promised by the caller.
        _mm512_slli_epi32::<16>(unsafe { load16(place.cast(), len) })
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn eight(place: *const Self) -> __m256 {
        // SAFETY: as promised by the caller.
        let bits = _mm256_cvtepu16_epi32(unsafe { _mm_loadu_si128(place.cast()) });
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn pairs(place: *const Self, len: usize, _part: usize) -> __m512i {
        // SAFETY: the lanes of the mask are the values.
        unsafe { _mm512_maskz_loadu_epi16(((1u64 << len.min(32)) - 1) as u32, place.cast()) }
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

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn store(place: *mut Self, len: usize, values: __m512) {
        let bits = _mm512_castps_si512(values);
        let high = _mm512_srli_epi32::<16>(bits);
        let odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
        let half = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd);
        let nearest = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, half));
        let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
        let nearest = _mm512_mask_or_epi32(nearest, is_nan, high, _mm512_set1_epi32(0x40));
        let nearest = _mm512_cvtepi32_epi16(nearest);
        // SAFETY: the lanes of the mask are the values.
        unsafe { _mm256_mask_storeu_epi16(place.cast(), first_of_16(len), nearest) };
    }
}

impl Lanes for f16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn terms(place: *const Self, len: usize) -> __m512i {
        // SAFETY: as promised by the caller.
        _mm512_castps_si512(_mm512_cvtph_ps(unsafe {
            _mm256_maskz_loadu_epi16(first_of_16(len), place.cast())
        }))
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn eight(place: *const Self) -> __m256 {
        // SAFETY: as promised by the caller.
        _mm256_cvtph_ps(unsafe { _mm_loadu_si128(place.cast()) })
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

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn store(place: *mut Self, len: usize, values: __m512) {
        let nearest = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(values);
        // SAFETY: the lanes of the mask are the values.
        unsafe { _mm256_mask_storeu_epi16(place.cast(), first_of_16(len), nearest) };
    }
}

#[cfg(test)]
mod tests {
    use crate::cpu::element::Element;
    use crate::cpu::processor::has_avx512;
    use half::{bf16, f16};
    use std::arch::x86_64::{_mm512_castsi512_ps, _mm512_loadu_si512};

    fn check<T: Element>() {
        // Every sign and exponent, with fractions around all ties, of which the largest exponent has infinities and NaNs.
        let fractions = [
            0, 1, 0xfff, 0x1000, 0x1001, 0x3000, 0x7fff, 0x8000, 0x8001, 0x18000, 0x7f_ffff,
        ];
        let exponents = 0..512u32;
        let bits =
            exponents.flat_map(|exponent| fractions.map(|fraction| exponent << 23 | fraction));
        let bits: Vec<u32> = bits.collect();
        for (i, bits) in bits.windows(16).enumerate() {
            let len = i % 17;
            let mut got = [T::nearest(7.0); 16];
            // SAFETY: the test asks for the instructions; there is room for 16 values.
            unsafe {
                let values = _mm512_loadu_si512(bits.as_ptr().cast());
                T::store(got.as_mut_ptr(), len, _mm512_castsi512_ps(values));
            }
            for (i, got) in got.iter().enumerate() {
                let value = if i < len {
                    f32::from_bits(bits[i])
                } else {
                    7.0
                };
                let [got, want] = [*got, T::nearest(value)].map(|value| value.widen().to_bits());
                assert_eq!(got, want, "{value:e}, {:#x}, {i} of {len}", value.to_bits());
            }
        }
    }

    #[test]
    fn what_is_stored_is_what_is_nearest() {
        if has_avx512() {
            check::<f32>();
            check::<bf16>();
            check::<f16>();
        }
    }
}
