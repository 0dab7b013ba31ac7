//! Rows of weights in the blocks of GGUF files, as `candle_core::quantized` lays them out: what they hold, a few values at a time.

#![allow(unsafe_code)]

use crate::element::Element;
use crate::few_rows::{COLS_AT_ONCE, WeightRows, add};
use crate::lanes;
#[cfg(target_arch = "x86_64")]
use crate::lines::{LANES, Line};
#[cfg(target_arch = "x86_64")]
use crate::processor::has_avx512;
use crate::vectorised::vectorised;
use half::f16;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m512, _mm_cvtsi32_si128, _mm_loadu_si128, _mm_setr_epi32, _mm256_castsi128_si256,
    _mm256_set1_epi16, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32,
    _mm512_cvtph_ps, _mm512_mul_ps, _mm512_permutexvar_ps, _mm512_set1_ps, _mm512_setr_epi32,
    _mm512_setr_ps, _mm512_srli_epi32, _mm512_store_ps, _mm512_sub_ps,
};
use std::marker::PhantomData;

/// Values that are unpacked at a time, all of one scale.
const PART: usize = lanes::LANES;

/// A form of blocks.
pub(crate) trait Block: Sync {
    /// Values of a block, a divisor of the values that are summed in one go.
    const VALUES: usize;
    const BYTES: usize;

    /// Calls `each` with the values of a block, [`PART`] at a time, with the bits that candle gives them, and with the place of the first of them.
    fn for_each_part(block: &[u8], each: impl FnMut(usize, [f32; PART]));

    /// The same with sixteen values at a time.
    ///
    /// # Safety
    /// The processor has AVX-512.
    #[cfg(target_arch = "x86_64")]
    unsafe fn for_each_line(block: &[u8], each: impl FnMut(usize, __m512));
}

/// A scale in f16, and 32 codes of 8 bits.
pub(crate) struct Q8Blocks;

/// Two scales in f16, for each 32 values a scale and a minimum of 6 bits, and 256 codes of 4 bits.
pub(crate) struct Q4KBlocks;

#[inline(always)]
fn whole<const N: usize>(block: &[u8]) -> &[u8; N] {
    let Ok(block) = block.try_into() else {
        unreachable!("rows are cut into whole blocks")
    };
    block
}

#[inline(always)]
fn f16_at(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).widen()
}

impl Block for Q8Blocks {
    const VALUES: usize = 32;
    const BYTES: usize = 34;

    #[inline(always)]
    fn for_each_part(block: &[u8], mut each: impl FnMut(usize, [f32; PART])) {
        let block: &[u8; Self::BYTES] = whole(block);
        let (scale, codes) = (f16_at(block), &block[2..]);
        each(
            0,
            std::array::from_fn(|i| f32::from(codes[i].cast_signed()) * scale),
        );
    }

    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn for_each_line(block: &[u8], mut each: impl FnMut(usize, __m512)) {
        let block: &[u8; Self::BYTES] = whole(block);
        let scale = i16::from_le_bytes([block[0], block[1]]);
        let scale = _mm512_cvtph_ps(_mm256_set1_epi16(scale));
        for at in [0, LANES] {
            // SAFETY: sixteen of the 32 codes.
            let codes = unsafe { _mm_loadu_si128(block.as_ptr().add(2 + at).cast()) };
            let codes = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
            each(at, _mm512_mul_ps(codes, scale));
        }
    }
}

impl Block for Q4KBlocks {
    const VALUES: usize = 256;
    const BYTES: usize = 144;

    #[inline(always)]
    fn for_each_part(block: &[u8], mut each: impl FnMut(usize, [f32; PART])) {
        let block = whole(block);
        let [scales, mins] = Self::scales_and_mins(block);
        for (part, (scale, min)) in scales.into_iter().zip(mins).enumerate() {
            let codes = &block[16 + part / 2 * PART..][..PART];
            let shift = part % 2 * 4;
            let value = |i: usize| scale * f32::from(codes[i] >> shift & 15) - min;
            each(part * PART, std::array::from_fn(value));
        }
    }

    /// A value is looked up by its code, of which the lower four bits of a lane count: of each part there are sixteen different ones.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn for_each_line(block: &[u8], mut each: impl FnMut(usize, __m512)) {
        let block: &[u8; Self::BYTES] = whole(block);
        let factors = i32::from_le_bytes([block[0], block[1], block[2], block[3]]);
        let factors = _mm512_cvtph_ps(_mm256_castsi128_si256(_mm_cvtsi32_si128(factors)));
        let of_part = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        let factors = _mm512_permutexvar_ps(of_part, factors);
        let [[s0, s1], [m0, m1]] = Self::bits(block).map(|four| four.map(u32::cast_signed));
        let bits = _mm512_cvtepu8_epi32(_mm_setr_epi32(s0, s1, m0, m1));
        let mut scales_and_mins = Line::ZERO;
        let place = scales_and_mins.0.as_mut_ptr().cast();
        // SAFETY: a line is 64 bytes, aligned.
        unsafe { _mm512_store_ps(place, _mm512_mul_ps(_mm512_cvtepi32_ps(bits), factors)) };
        // From memory each is broadcast as it is loaded, which leaves the shuffles to the values.
        let scales_and_mins = std::hint::black_box(&scales_and_mins);
        let of = |i: usize| _mm512_set1_ps(f32::from_bits(scales_and_mins.0[i]));
        let codes = _mm512_setr_ps(
            0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.,
        );
        for pair in 0..4 {
            let values = [2 * pair, 2 * pair + 1]
                .map(|part| _mm512_sub_ps(_mm512_mul_ps(codes, of(part)), of(8 + part)));
            for at in [0, LANES] {
                // SAFETY: sixteen of the 128 bytes of codes after the first 16.
                let codes = unsafe {
                    let place = block.as_ptr().add(16 + pair * PART + at);
                    _mm512_cvtepu8_epi32(_mm_loadu_si128(place.cast()))
                };
                let first = 2 * pair * PART + at;
                each(first, _mm512_permutexvar_ps(codes, values[0]));
                let upper = _mm512_srli_epi32::<4>(codes);
                each(first + PART, _mm512_permutexvar_ps(upper, values[1]));
            }
        }
    }
}

impl Q4KBlocks {
    /// The six bits of the scale of each part, and those of its minimum, four parts in a number.
    #[inline(always)]
    fn bits(block: &[u8; Self::BYTES]) -> [[u32; 2]; 2] {
        let four = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| block[at + i]));
        let (scales, mins, upper) = (four(4), four(8), four(12));
        // Of the last four parts the lower four bits lie in bytes of their own, the others above those of the first four.
        let high = |of: u32| (of >> 6 & 0x0303_0303) << 4;
        let low = 0x0f0f_0f0f;
        [
            [scales & 0x3f3f_3f3f, upper & low | high(scales)],
            [mins & 0x3f3f_3f3f, upper >> 4 & low | high(mins)],
        ]
    }

    /// Of the values of each part: one is its code times the first, less the second.
    #[inline(always)]
    fn scales_and_mins(block: &[u8; Self::BYTES]) -> [[f32; 8]; 2] {
        let factors = [f16_at(block), f16_at(&block[2..])];
        let bits = Self::bits(block);
        std::array::from_fn(|of| {
            let bytes = bits[of].map(u32::to_le_bytes);
            std::array::from_fn(|part| factors[of] * f32::from(bytes[part / 4][part % 4]))
        })
    }
}

/// Rows of blocks, one after the other.
pub(crate) struct RowsOfBlocks<'a, B> {
    bytes: &'a [u8],
    row_bytes: usize,
    form: PhantomData<B>,
}

impl<'a, B: Block> RowsOfBlocks<'a, B> {
    /// Rows of `len` values, a multiple of those of a block.
    pub(crate) fn new(bytes: &'a [u8], len: usize) -> Self {
        Self {
            bytes,
            row_bytes: len / B::VALUES * B::BYTES,
            form: PhantomData,
        }
    }
}

impl<B: Block> WeightRows for RowsOfBlocks<'_, B> {
    fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    fn add_dots<const R: usize>(
        &self,
        first: usize,
        start: usize,
        xs: [&[f32]; R],
        sums: &mut [[f32; R]],
    ) {
        let len = xs[0].len() / B::VALUES * B::BYTES;
        let row = |row: usize| {
            let row = &self.bytes[(first + row) * self.row_bytes..][..self.row_bytes];
            &row[start / B::VALUES * B::BYTES..][..len]
        };
        let ahead = COLS_AT_ONCE * self.row_bytes;
        if sums.len() == COLS_AT_ONCE {
            let rows = std::array::from_fn(row);
            return add(sums, &dots::<B, COLS_AT_ONCE, R>(rows, xs, ahead));
        }
        for (col, sums) in sums.iter_mut().enumerate() {
            add(
                std::slice::from_mut(sums),
                &dots::<B, 1, R>([row(col)], xs, ahead),
            );
        }
    }
}

/// The products of the values of rows of blocks with rows of as many. What lies `ahead` bytes further is read next.
fn dots<B: Block, const C: usize, const R: usize>(
    rows: [&[u8]; C],
    xs: [&[f32]; R],
    ahead: usize,
) -> [[f32; R]; C] {
    #[cfg(target_arch = "x86_64")]
    if has_avx512() {
        let len = xs[0].len();
        let num_blocks = len / B::VALUES;
        assert!(xs.iter().all(|xs| xs.len() == len) && len.is_multiple_of(B::VALUES));
        assert!(rows.iter().all(|row| row.len() == num_blocks * B::BYTES));
        // SAFETY: the processor has what the function is compiled for, and the rows have this length.
        return unsafe { avx512::dots::<B, C, R>(rows, xs.map(<[f32]>::as_ptr), ahead) };
    }
    vectorised(
        #[inline(always)]
        || rows.map(|row| lane_dots::<B, R>(row, xs)),
    )
}

#[inline(always)]
fn lane_dots<B: Block, const R: usize>(blocks: &[u8], xs: [&[f32]; R]) -> [f32; R] {
    let mut lanes = [[0f32; PART]; R];
    for (i, block) in blocks.chunks_exact(B::BYTES).enumerate() {
        B::for_each_part(
            block,
            #[inline(always)]
            |at, weights| {
                for (lanes, xs) in lanes.iter_mut().zip(&xs) {
                    let xs = &xs[i * B::VALUES + at..][..PART];
                    for ((lane, weight), x) in lanes.iter_mut().zip(weights).zip(xs) {
                        *lane += weight * x;
                    }
                }
            },
        );
    }
    lanes.map(|lanes| lanes::join(lanes, |a, b| a + b))
}

/// Codes are made f32 sixteen at a time.
#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::Block;
    use crate::lines::{Line, prefetch};
    use std::arch::x86_64::{
        _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_reduce_add_ps, _mm512_setzero_ps,
    };

    /// # Safety
    /// The processor has AVX-512, and each of `xs` has as many values as a row of blocks.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    pub(super) unsafe fn dots<B: Block, const C: usize, const R: usize>(
        rows: [&[u8]; C],
        xs: [*const f32; R],
        ahead: usize,
    ) -> [[f32; R]; C] {
        let mut sums = [[_mm512_setzero_ps(); R]; C];
        for block in 0..rows[0].len() / B::BYTES {
            for (row, sums) in rows.iter().zip(&mut sums) {
                let bytes = &row[block * B::BYTES..][..B::BYTES];
                let first = block * B::VALUES;
                // Rows are too short for the processor to find out in time that others follow.
                let next = bytes.as_ptr().cast::<i8>().wrapping_add(ahead);
                for byte in (0..B::BYTES).step_by(size_of::<Line>()) {
                    prefetch(next.wrapping_add(byte));
                }
                // SAFETY: the processor has AVX-512, and each row the values of the block.
                unsafe {
                    B::for_each_line(bytes, |at, weights| {
                        for (sum, xs) in sums.iter_mut().zip(xs) {
                            let xs = _mm512_loadu_ps(xs.add(first + at));
                            *sum = _mm512_fmadd_ps(weights, xs, *sum);
                        }
                    });
                }
            }
        }
        sums.map(|sums| sums.map(|sum| _mm512_reduce_add_ps(sum)))
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::{Block, Q4KBlocks, Q8Blocks};
    use crate::lines::LANES;
    use crate::processor::has_avx512;
    use std::arch::x86_64::_mm512_storeu_ps;

    fn check<B: Block>() {
        for seed in 0..50usize {
            // Any bits but those of factors that are no numbers.
            let byte = |i: usize| (((i + seed * 997) * 2_654_435_761) >> 13) as u8;
            let mut block: Vec<u8> = (0..B::BYTES).map(byte).collect();
            block[1] &= 0xbf;
            block[3] &= 0xbf;
            let mut want = vec![f32::NAN; B::VALUES];
            B::for_each_part(&block, |at, values| {
                want[at..at + values.len()].copy_from_slice(&values);
            });
            let mut got = vec![f32::NAN; B::VALUES];
            // SAFETY: the test asks for AVX-512, and there is room for 16 values at each place.
            unsafe {
                B::for_each_line(&block, |at, values| {
                    _mm512_storeu_ps(got[at..at + LANES].as_mut_ptr(), values);
                });
            }
            let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            assert_eq!(bits(got), bits(want), "{seed}");
        }
    }

    #[test]
    fn lines_of_values_are_the_parts_of_them() {
        if has_avx512() {
            check::<Q8Blocks>();
            check::<Q4KBlocks>();
        }
    }
}
