//! Rows of weights in the blocks of GGUF files, as `candle_core::quantized` lays them out: what they hold, a few values at a time.

#![allow(unsafe_code)]

use crate::element::Element;
use crate::few_rows::WeightRows;
use crate::lanes;
#[cfg(target_arch = "x86_64")]
use crate::lines::LANES;
#[cfg(target_arch = "x86_64")]
use crate::processor::has_avx512;
use crate::vectorised::vectorised;
use half::f16;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m512, _mm_cvtsi32_si128, _mm_loadu_si128, _mm512_and_si512, _mm512_cvtepi8_epi32,
    _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32, _mm512_mul_ps, _mm512_set1_epi32, _mm512_set1_ps,
    _mm512_srl_epi32, _mm512_sub_ps,
};
use std::marker::PhantomData;

/// Values that are unpacked at a time, all of one scale.
const PART: usize = lanes::LANES;

/// A form of blocks.
pub(crate) trait Block: Sync {
    /// Values of a block, a divisor of the values that are summed in one go.
    const VALUES: usize;
    const BYTES: usize;

    /// Values `part * PART` and on of a block, with the bits that candle gives them.
    fn unpack(block: &[u8], part: usize) -> [f32; PART];

    /// The same.
    ///
    /// # Safety
    /// The processor has AVX-512, and the block this part.
    #[cfg(target_arch = "x86_64")]
    unsafe fn terms(block: &[u8], part: usize) -> [__m512; 2];
}

/// A scale in f16, and 32 codes of 8 bits.
pub(crate) struct Q8Blocks;

/// Two scales in f16, for each 32 values a scale and a minimum of 6 bits, and 256 codes of 4 bits.
pub(crate) struct Q4KBlocks;

#[inline(always)]
fn f16_at(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).widen()
}

impl Block for Q8Blocks {
    const VALUES: usize = 32;
    const BYTES: usize = 34;

    #[inline(always)]
    fn unpack(block: &[u8], _part: usize) -> [f32; PART] {
        let scale = f16_at(block);
        let codes = &block[2..][..PART];
        std::array::from_fn(|i| f32::from(codes[i].cast_signed()) * scale)
    }

    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn terms(block: &[u8], _part: usize) -> [__m512; 2] {
        let scale = _mm512_set1_ps(f16_at(block));
        let codes = &block[2..][..PART];
        [0, LANES].map(|half| {
            // SAFETY: sixteen codes of a slice of 32.
            let codes = unsafe { _mm_loadu_si128(codes.as_ptr().add(half).cast()) };
            _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)), scale)
        })
    }
}

impl Block for Q4KBlocks {
    const VALUES: usize = 256;
    const BYTES: usize = 144;

    #[inline(always)]
    fn unpack(block: &[u8], part: usize) -> [f32; PART] {
        let [scale, min] = Self::scale_and_min(block, part);
        let codes = &block[16 + part / 2 * PART..][..PART];
        let shift = part % 2 * 4;
        std::array::from_fn(|i| scale * f32::from(codes[i] >> shift & 15) - min)
    }

    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn terms(block: &[u8], part: usize) -> [__m512; 2] {
        let [scale, min] = Self::scale_and_min(block, part).map(|x| _mm512_set1_ps(x));
        let codes = &block[16 + part / 2 * PART..][..PART];
        let shift = _mm_cvtsi32_si128((part % 2 * 4) as i32);
        [0, LANES].map(|half| {
            // SAFETY: sixteen codes of a slice of 32.
            let codes = unsafe { _mm_loadu_si128(codes.as_ptr().add(half).cast()) };
            let codes = _mm512_srl_epi32(_mm512_cvtepu8_epi32(codes), shift);
            let codes = _mm512_cvtepi32_ps(_mm512_and_si512(codes, _mm512_set1_epi32(15)));
            _mm512_sub_ps(_mm512_mul_ps(codes, scale), min)
        })
    }
}

impl Q4KBlocks {
    /// Of the values of a part: each is its code times the one, less the other.
    #[inline(always)]
    fn scale_and_min(block: &[u8], part: usize) -> [f32; 2] {
        let (scale, min) = (f16_at(block), f16_at(&block[2..]));
        let bits = &block[4..16];
        // Those of the last four parts lie in the upper bits of the others and in bytes of their own.
        let (of_scale, of_min) = match part {
            0..4 => (bits[part] & 63, bits[part + 4] & 63),
            _ => (
                bits[part + 4] & 15 | bits[part - 4] >> 6 << 4,
                bits[part + 4] >> 4 | bits[part] >> 6 << 4,
            ),
        };
        [scale * f32::from(of_scale), min * f32::from(of_min)]
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
        for (row, sums) in sums.iter_mut().enumerate() {
            let row = &self.bytes[(first + row) * self.row_bytes..][..self.row_bytes];
            let len = xs[0].len() / B::VALUES * B::BYTES;
            let blocks = &row[start / B::VALUES * B::BYTES..][..len];
            for (sum, dot) in sums.iter_mut().zip(dots::<B, R>(blocks, xs)) {
                *sum += dot;
            }
        }
    }
}

/// The products of the values of blocks with rows of as many.
fn dots<B: Block, const R: usize>(blocks: &[u8], xs: [&[f32]; R]) -> [f32; R] {
    #[cfg(target_arch = "x86_64")]
    if has_avx512() {
        let len = blocks.len() / B::BYTES * B::VALUES;
        assert!(xs.iter().all(|xs| xs.len() == len));
        // SAFETY: the processor has what the function is compiled for, and the rows have this length.
        return unsafe { avx512::dots::<B, R>(blocks, xs.map(<[f32]>::as_ptr)) };
    }
    vectorised(
        #[inline(always)]
        || lane_dots::<B, R>(blocks, xs),
    )
}

#[inline(always)]
fn lane_dots<B: Block, const R: usize>(blocks: &[u8], xs: [&[f32]; R]) -> [f32; R] {
    let mut lanes = [[0f32; PART]; R];
    for (i, block) in blocks.chunks_exact(B::BYTES).enumerate() {
        for part in 0..B::VALUES / PART {
            let weights = B::unpack(block, part);
            let at = i * B::VALUES + part * PART;
            for (lanes, xs) in lanes.iter_mut().zip(&xs) {
                let xs = &xs[at..][..PART];
                for ((lane, weight), x) in lanes.iter_mut().zip(weights).zip(xs) {
                    *lane += weight * x;
                }
            }
        }
    }
    lanes.map(|lanes| lanes::join(lanes, |a, b| a + b))
}

/// Codes are made f32 sixteen at a time.
#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::{Block, PART};
    use crate::lines::LANES;
    use std::arch::x86_64::{
        __m512, _mm512_add_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_reduce_add_ps,
        _mm512_setzero_ps,
    };

    /// # Safety
    /// The processor has AVX-512, and each row has as many values as the blocks.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    pub(super) unsafe fn dots<B: Block, const R: usize>(
        blocks: &[u8],
        xs: [*const f32; R],
    ) -> [f32; R] {
        let (mut even, mut odd) = ([_mm512_setzero_ps(); R], [_mm512_setzero_ps(); R]);
        for (i, block) in blocks.chunks_exact(B::BYTES).enumerate() {
            for part in 0..B::VALUES / PART {
                let at = i * B::VALUES + part * PART;
                // SAFETY: the block has this part, and each row these values.
                unsafe {
                    let [first, next] = B::terms(block, part);
                    add(&mut even, first, xs, at);
                    add(&mut odd, next, xs, at + LANES);
                }
            }
        }
        std::array::from_fn(|i| _mm512_reduce_add_ps(_mm512_add_ps(even[i], odd[i])))
    }

    /// # Safety
    /// The processor has AVX-512, and each row has 16 values from `at` on.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn add<const R: usize>(
        sums: &mut [__m512; R],
        weights: __m512,
        xs: [*const f32; R],
        at: usize,
    ) {
        for row in 0..R {
            // SAFETY: as promised by the caller.
            let xs = unsafe { _mm512_loadu_ps(xs[row].add(at)) };
            sums[row] = _mm512_fmadd_ps(weights, xs, sums[row]);
        }
    }
}
