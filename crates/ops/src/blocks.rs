//! Rows of weights in the blocks of GGUF files, as `candle_core::quantized` lays them out: what they hold, a few values at a time.

use crate::element::Element;
use crate::few_rows::WeightRows;
use crate::lanes;
use crate::vectorised::vectorised;
use half::f16;
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
}

impl Block for Q4KBlocks {
    const VALUES: usize = 256;
    const BYTES: usize = 144;

    #[inline(always)]
    fn unpack(block: &[u8], part: usize) -> [f32; PART] {
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
        let (scale, min) = (scale * f32::from(of_scale), min * f32::from(of_min));
        let codes = &block[16 + part / 2 * PART..][..PART];
        let shift = part % 2 * 4;
        std::array::from_fn(|i| scale * f32::from(codes[i] >> shift & 15) - min)
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
        (first, start): (usize, usize),
        xs: [&[f32]; R],
        sums: &mut [[f32; R]],
    ) {
        for (row, sums) in sums.iter_mut().enumerate() {
            let row = &self.bytes[(first + row) * self.row_bytes..][..self.row_bytes];
            let blocks = &row[start / B::VALUES * B::BYTES..];
            let dots = vectorised(
                #[inline(always)]
                || dots::<B, R>(blocks, xs),
            );
            for (sum, dot) in sums.iter_mut().zip(dots) {
                *sum += dot;
            }
        }
    }
}

#[inline(always)]
fn dots<B: Block, const R: usize>(blocks: &[u8], xs: [&[f32]; R]) -> [f32; R] {
    let mut lanes = [[0f32; PART]; R];
    let num_blocks = xs[0].len() / B::VALUES;
    for (i, block) in blocks.chunks_exact(B::BYTES).take(num_blocks).enumerate() {
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
