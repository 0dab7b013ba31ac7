//! Vectors of f32 as wide as the processor has them, for kernels that are written once for all of them.
//!
//! In contrast to [`crate::cpu::vectorised`] a product and a sum are one operation with one rounding where the processor has it, and the number of lanes is that
//! of the processor: bits are the same on equal machines.

#![allow(unsafe_code)]

use super::element::Element;
use half::f16;

/// f32 side by side.
///
/// # Safety
/// The processor has the instructions of the type, as it is known to where [`run_widest`] runs a [`Kernel`], and arrays need none. From `place` on there are as
/// many values as there are lanes, or as the function says, which may be read or written.
pub(crate) trait Vector: Copy {
    const LANES: usize;
    /// Vectors that the processor holds.
    const REGISTERS: usize;

    unsafe fn splat(value: f32) -> Self;

    /// The value of the f16 with these bits.
    unsafe fn splat_f16(bits: u16) -> Self;

    /// As many values as there are lanes, from `place` on.
    unsafe fn load<T: Element>(place: *const T) -> Self;

    /// As many integers as there are lanes, from `place` on.
    unsafe fn of_i8(place: *const i8) -> Self;

    /// `scale * code - min` for the codes of 4 bits in as many bytes as there are lanes, from `place` on: those in the lower halves by the first factors, then
    /// those in the upper halves by the others.
    unsafe fn of_nibbles(place: *const u8, scales: [f32; 2], mins: [f32; 2]) -> [Self; 2];

    /// Writes the lanes from `place` on.
    unsafe fn store(self, place: *mut f32);

    unsafe fn times(self, other: Self) -> Self;

    /// `self * other + sum`.
    unsafe fn times_plus(self, other: Self, sum: Self) -> Self;

    /// The sum of the lanes.
    unsafe fn sum(self) -> f32;

    /// Those of four vectors, with the same bits.
    #[inline(always)]
    unsafe fn sum_each(vectors: [Self; 4]) -> [f32; 4] {
        // SAFETY: as promised by the caller.
        vectors.map(|vector| unsafe { vector.sum() })
    }

    /// `len` values from `place` on, fewer than there are lanes, then zeros.
    #[inline(always)]
    unsafe fn load_first<T: Element>(place: *const T, len: usize) -> Self {
        let mut values = [T::nearest(0.0); MAX_LANES];
        // SAFETY: the caller has so many values.
        values[..len].copy_from_slice(unsafe { std::slice::from_raw_parts(place, len) });
        // SAFETY: no type has more lanes.
        unsafe { Self::load(values.as_ptr()) }
    }
}

const MAX_LANES: usize = 16;

/// What is computed with vectors. `run` and all that it calls must be `#[inline(always)]`: only code inlined there is compiled for the instructions.
pub(crate) trait Kernel {
    type Output;

    /// # Safety
    /// As for `V`.
    unsafe fn run<V: Vector>(self) -> Self::Output;
}

/// Runs the kernel with the widest vectors of the processor.
#[inline]
pub(crate) fn run_widest<K: Kernel>(kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    {
        if crate::cpu::processor::has_avx512() {
            // SAFETY: the processor has what the function is compiled for.
            return unsafe { x86_64::run_avx512(kernel) };
        }
        if crate::cpu::processor::has_avx2() {
            // SAFETY: as above.
            return unsafe { x86_64::run_avx2(kernel) };
        }
    }
    // SAFETY: arrays need no instructions.
    unsafe { kernel.run::<[f32; 8]>() }
}

/// What a kernel gives with each type of vectors that the processor has.
#[cfg(test)]
pub(crate) fn run_each<K: Kernel>(mut kernel: impl FnMut() -> K) -> Vec<K::Output> {
    // SAFETY: arrays need no instructions.
    let mut outputs = vec![unsafe { kernel().run::<[f32; 8]>() }];
    #[cfg(target_arch = "x86_64")]
    {
        if crate::cpu::processor::has_avx2() {
            // SAFETY: the processor has what the function is compiled for.
            outputs.push(unsafe { x86_64::run_avx2(kernel()) });
        }
        if crate::cpu::processor::has_avx512() {
            // SAFETY: as above.
            outputs.push(unsafe { x86_64::run_avx512(kernel()) });
        }
    }
    outputs
}

/// For all other processors.
impl Vector for [f32; 8] {
    const LANES: usize = 8;
    const REGISTERS: usize = 8;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        [value; 8]
    }

    #[inline(always)]
    unsafe fn splat_f16(bits: u16) -> Self {
        [f16::from_bits(bits).widen(); 8]
    }

    #[inline(always)]
    unsafe fn load<T: Element>(place: *const T) -> Self {
        // SAFETY: as promised by the caller.
        std::array::from_fn(|i| unsafe { place.add(i).read() }.widen())
    }

    #[inline(always)]
    unsafe fn of_i8(place: *const i8) -> Self {
        // SAFETY: as promised by the caller.
        std::array::from_fn(|i| f32::from(unsafe { place.add(i).read() }))
    }

    #[inline(always)]
    unsafe fn of_nibbles(place: *const u8, scales: [f32; 2], mins: [f32; 2]) -> [Self; 2] {
        // SAFETY: as promised by the caller.
        let codes: [u8; 8] = std::array::from_fn(|i| unsafe { place.add(i).read() });
        let value = |code: u8, of: usize| scales[of] * f32::from(code) - mins[of];
        [
            codes.map(|code| value(code & 15, 0)),
            codes.map(|code| value(code >> 4, 1)),
        ]
    }

    #[inline(always)]
    unsafe fn store(self, place: *mut f32) {
        // SAFETY: as promised by the caller.
        unsafe { place.cast::<Self>().write_unaligned(self) };
    }

    #[inline(always)]
    unsafe fn times(self, other: Self) -> Self {
        std::array::from_fn(|i| self[i] * other[i])
    }

    #[inline(always)]
    unsafe fn times_plus(self, other: Self, sum: Self) -> Self {
        std::array::from_fn(|i| self[i] * other[i] + sum[i])
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let fours: [f32; 4] = std::array::from_fn(|i| self[i] + self[i + 4]);
        (fours[0] + fours[2]) + (fours[1] + fours[3])
    }
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use super::{Kernel, Vector};
    use crate::cpu::element::Element;
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    pub(super) fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
        // SAFETY: the processor has the instructions.
        unsafe { kernel.run::<__m512>() }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
        // SAFETY: as above.
        unsafe { kernel.run::<__m256>() }
    }

    impl Vector for __m512 {
        const LANES: usize = 16;
        const REGISTERS: usize = 32;

        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            // SAFETY: as promised by the caller, like everything below.
            unsafe { _mm512_set1_ps(value) }
        }

        #[inline(always)]
        unsafe fn splat_f16(bits: u16) -> Self {
            // SAFETY: see above.
            unsafe { _mm512_cvtph_ps(_mm256_set1_epi16(bits.cast_signed())) }
        }

        #[inline(always)]
        unsafe fn load<T: Element>(place: *const T) -> Self {
            // SAFETY: see above.
            unsafe { _mm512_castsi512_ps(T::terms(place, Self::LANES)) }
        }

        #[inline(always)]
        unsafe fn load_first<T: Element>(place: *const T, len: usize) -> Self {
            // SAFETY: see above.
            unsafe { _mm512_castsi512_ps(T::terms(place, len)) }
        }

        #[inline(always)]
        unsafe fn of_i8(place: *const i8) -> Self {
            // SAFETY: see above.
            unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(place.cast()))) }
        }

        /// A value is looked up by its code, of which the lower four bits of a lane count: there are sixteen different ones.
        #[inline(always)]
        unsafe fn of_nibbles(place: *const u8, scales: [f32; 2], mins: [f32; 2]) -> [Self; 2] {
            // SAFETY: see above.
            unsafe {
                let all = _mm512_setr_ps(
                    0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.,
                );
                let lower = _mm512_cvtepu8_epi32(_mm_loadu_si128(place.cast()));
                let upper = _mm512_srli_epi32::<4>(lower);
                let [scale, min] = [_mm512_set1_ps(scales[0]), _mm512_set1_ps(mins[0])];
                let of_lower = _mm512_fmsub_ps(all, scale, min);
                let [scale, min] = [_mm512_set1_ps(scales[1]), _mm512_set1_ps(mins[1])];
                let of_upper = _mm512_fmsub_ps(all, scale, min);
                [
                    _mm512_permutexvar_ps(lower, of_lower),
                    _mm512_permutexvar_ps(upper, of_upper),
                ]
            }
        }

        #[inline(always)]
        unsafe fn store(self, place: *mut f32) {
            // SAFETY: see above.
            unsafe { _mm512_storeu_ps(place, self) };
        }

        #[inline(always)]
        unsafe fn times(self, other: Self) -> Self {
            // SAFETY: see above.
            unsafe { _mm512_mul_ps(self, other) }
        }

        #[inline(always)]
        unsafe fn times_plus(self, other: Self, sum: Self) -> Self {
            // SAFETY: see above.
            unsafe { _mm512_fmadd_ps(self, other, sum) }
        }

        #[inline(always)]
        unsafe fn sum(self) -> f32 {
            // SAFETY: see above.
            unsafe { _mm512_reduce_add_ps(self) }
        }

        #[inline(always)]
        unsafe fn sum_each([a, b, c, d]: [Self; 4]) -> [f32; 4] {
            // SAFETY: see above; four lanes are written.
            unsafe {
                // Quarters that are added of two vectors, then of four, then lanes of each quarter.
                let halves = |a, b| {
                    let lower = _mm512_shuffle_f32x4::<0x44>(a, b);
                    _mm512_add_ps(lower, _mm512_shuffle_f32x4::<0xee>(a, b))
                };
                let (ab, cd) = (halves(a, b), halves(c, d));
                let even = _mm512_shuffle_f32x4::<0x88>(ab, cd);
                let fours = _mm512_add_ps(even, _mm512_shuffle_f32x4::<0xdd>(ab, cd));
                let twos = _mm512_add_ps(fours, _mm512_permute_ps::<0x4e>(fours));
                let ones = _mm512_add_ps(twos, _mm512_permute_ps::<0xb1>(twos));
                let sums = _mm512_maskz_compress_ps(0x1111, ones);
                std::mem::transmute::<__m128, [f32; 4]>(_mm512_castps512_ps128(sums))
            }
        }
    }

    impl Vector for __m256 {
        const LANES: usize = 8;
        const REGISTERS: usize = 16;

        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            // SAFETY: as promised by the caller, like everything below.
            unsafe { _mm256_set1_ps(value) }
        }

        #[inline(always)]
        unsafe fn splat_f16(bits: u16) -> Self {
            // SAFETY: see above.
            unsafe { _mm256_cvtph_ps(_mm_set1_epi16(bits.cast_signed())) }
        }

        #[inline(always)]
        unsafe fn load<T: Element>(place: *const T) -> Self {
            // SAFETY: see above.
            unsafe { T::eight(place) }
        }

        #[inline(always)]
        unsafe fn of_i8(place: *const i8) -> Self {
            // SAFETY: see above.
            unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(place.cast()))) }
        }

        #[inline(always)]
        unsafe fn of_nibbles(place: *const u8, scales: [f32; 2], mins: [f32; 2]) -> [Self; 2] {
            // SAFETY: see above.
            unsafe {
                let codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(place.cast()));
                let lower = _mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32(15)));
                let upper = _mm256_cvtepi32_ps(_mm256_srli_epi32::<4>(codes));
                let [scale, min] = [_mm256_set1_ps(scales[0]), _mm256_set1_ps(mins[0])];
                let lower = _mm256_fmsub_ps(lower, scale, min);
                let [scale, min] = [_mm256_set1_ps(scales[1]), _mm256_set1_ps(mins[1])];
                [lower, _mm256_fmsub_ps(upper, scale, min)]
            }
        }

        #[inline(always)]
        unsafe fn store(self, place: *mut f32) {
            // SAFETY: see above.
            unsafe { _mm256_storeu_ps(place, self) };
        }

        #[inline(always)]
        unsafe fn times(self, other: Self) -> Self {
            // SAFETY: see above.
            unsafe { _mm256_mul_ps(self, other) }
        }

        #[inline(always)]
        unsafe fn times_plus(self, other: Self, sum: Self) -> Self {
            // SAFETY: see above.
            unsafe { _mm256_fmadd_ps(self, other, sum) }
        }

        #[inline(always)]
        unsafe fn sum(self) -> f32 {
            // SAFETY: see above.
            unsafe {
                let fours = _mm_add_ps(
                    _mm256_castps256_ps128(self),
                    _mm256_extractf128_ps::<1>(self),
                );
                let twos = _mm_add_ps(fours, _mm_movehl_ps(fours, fours));
                _mm_cvtss_f32(_mm_add_ss(twos, _mm_movehdup_ps(twos)))
            }
        }
    }
}
