//! Rows of weights in the blocks of GGUF files, as `candle_core::quantized` lays them out: what they hold, a few values at a time.

#![allow(unsafe_code)]

use crate::cpu::lines::{Line, prefetch};
use crate::cpu::vector::Vector;
use crate::product::few_rows::{COLS_AT_ONCE, WeightRows, lane_sums};
use std::marker::PhantomData;

/// Values of one scale.
const PART: usize = 32;

/// A form of blocks.
pub(crate) trait BlockFormat: Sync {
    /// Values of a block, a divisor of the values that are summed in one go.
    const VALUES: usize;
    const BYTES: usize;

    /// Values that [`BlockFormat::step`] makes at a time.
    const STEP: usize;

    /// What its codes are scaled by.
    type Factors: Copy;

    /// Those of a block.
    ///
    /// # Safety
    /// As for `V`; a block starts at `block`.
    unsafe fn factors<V: Vector>(block: *const u8) -> Self::Factors;

    /// Calls `each` with the values of a step of a block, as many as a vector has at a time and in order, and with the place of the first of them.
    ///
    /// # Safety
    /// As for `V`; a block with these factors and such a step starts at `block`.
    unsafe fn step<V: Vector>(
        block: *const u8,
        factors: &Self::Factors,
        step: usize,
        each: impl FnMut(usize, V),
    );
}

/// A scale in f16, and 32 codes of 8 bits.
pub(crate) struct Q8Blocks;

/// Two scales in f16, for each 32 values a scale and a minimum of 6 bits, and 256 codes of 4 bits.
pub(crate) struct Q4KBlocks;

impl BlockFormat for Q8Blocks {
    const VALUES: usize = 32;
    const BYTES: usize = 34;
    const STEP: usize = 32;

    /// The bits of the scale.
    type Factors = u16;

    #[inline(always)]
    unsafe fn factors<V: Vector>(block: *const u8) -> u16 {
        // SAFETY: as promised by the caller.
        u16::from_le_bytes(unsafe { block.cast::<[u8; 2]>().read() })
    }

    #[inline(always)]
    unsafe fn step<V: Vector>(
        block: *const u8,
        scale: &u16,
        _step: usize,
        mut each: impl FnMut(usize, V),
    ) {
        for at in (0..Self::STEP).step_by(V::LANES) {
            // SAFETY: as promised by the caller; the codes follow the scale.
            each(at, unsafe {
                V::of_i8(block.add(2 + at).cast()).times(V::splat_f16(*scale))
            });
        }
    }
}

impl BlockFormat for Q4KBlocks {
    const VALUES: usize = 256;
    const BYTES: usize = 144;
    const STEP: usize = 2 * PART;

    /// The scales of the eight parts and their minimums, with room for what the widest vectors write at once.
    type Factors = [[f32; 16]; 2];

    #[inline(always)]
    unsafe fn factors<V: Vector>(block: *const u8) -> [[f32; 16]; 2] {
        // SAFETY: as promised by the caller.
        let head = unsafe { block.cast::<[u8; 16]>().read() };
        let mut factors = [[0f32; 16]; 2];
        for (of, bits) in Self::bits(&head).iter().enumerate() {
            let factor = u16::from_le_bytes([head[2 * of], head[2 * of + 1]]);
            for at in (0..8).step_by(V::LANES) {
                // SAFETY: as promised by the caller; there are as many bits and factors as the widest vectors have lanes.
                unsafe {
                    let bits = V::of_i8(bits.as_ptr().add(at).cast());
                    let place = factors[of].as_mut_ptr().add(at);
                    bits.times(V::splat_f16(factor)).store(place);
                }
            }
        }
        factors
    }

    #[inline(always)]
    unsafe fn step<V: Vector>(
        block: *const u8,
        factors: &[[f32; 16]; 2],
        step: usize,
        mut each: impl FnMut(usize, V),
    ) {
        // From memory each is broadcast as it is loaded, which leaves the shuffles to the values. And nothing is read before the sums of the last step are
        // done: values of several would not fit the registers.
        let [scales, mins] = std::hint::black_box(factors);
        let of_step = |factors: &[f32; 16]| [factors[2 * step], factors[2 * step + 1]];
        let [scales, mins] = [of_step(scales), of_step(mins)];
        // SAFETY: as promised by the caller; the parts of a step share as many bytes as each has values.
        unsafe {
            let vectors = PART / V::LANES;
            let mut values = [V::splat(0.0); 2 * PART / 8];
            // Loops over numbers: iterators over the values would leave these in memory.
            let mut i = 0;
            while i < vectors {
                let codes = block.add(16 + step * PART + i * V::LANES);
                [values[i], values[vectors + i]] = V::of_nibbles(codes, scales, mins);
                i += 1;
            }
            i = 0;
            while i < 2 * vectors {
                each(step * Self::STEP + i * V::LANES, values[i]);
                i += 1;
            }
        }
    }
}

impl Q4KBlocks {
    /// The six bits of the scale of each part, and those of its minimum, then zeros.
    #[inline(always)]
    fn bits(head: &[u8; 16]) -> [[u8; 16]; 2] {
        let four = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| head[at + i]));
        let (scales, mins, upper) = (four(4), four(8), four(12));
        // Of the last four parts the lower four bits lie in bytes of their own, the others above those of the first four.
        let high = |of: u32| (of >> 6 & 0x0303_0303) << 4;
        let low = 0x0f0f_0f0f;
        let joined = |first: u32, last: u32| u128::from(first) | u128::from(last) << 32;
        [
            joined(scales & 0x3f3f_3f3f, upper & low | high(scales)).to_le_bytes(),
            joined(mins & 0x3f3f_3f3f, upper >> 4 & low | high(mins)).to_le_bytes(),
        ]
    }
}

/// Rows of blocks, one after the other.
pub(crate) struct RowsOfBlocks<'a, B> {
    bytes: &'a [u8],
    row_bytes: usize,
    form: PhantomData<B>,
}

impl<'a, B: BlockFormat> RowsOfBlocks<'a, B> {
    /// Rows of `len` values, a multiple of those of a block.
    pub(crate) fn new(bytes: &'a [u8], len: usize) -> Self {
        Self {
            bytes,
            row_bytes: len / B::VALUES * B::BYTES,
            form: PhantomData,
        }
    }
}

impl<B: BlockFormat> RowsOfBlocks<'_, B> {
    /// Those of `len` values of a row from `start` on.
    fn blocks(&self, row: usize, start: usize, len: usize) -> &[u8] {
        let row = &self.bytes[row * self.row_bytes..][..self.row_bytes];
        &row[start / B::VALUES * B::BYTES..][..len / B::VALUES * B::BYTES]
    }

    /// Asks for the block of the row that comes when all that are read side by side are done: rows are too short for the processor to find out in time that
    /// others follow.
    #[inline(always)]
    fn prefetch_after(&self, block: *const u8) {
        let next = block.wrapping_add(COLS_AT_ONCE * self.row_bytes);
        for byte in (0..B::BYTES).step_by(size_of::<Line>()) {
            prefetch(next.wrapping_add(byte));
        }
    }
}

impl<B: BlockFormat> WeightRows for RowsOfBlocks<'_, B> {
    fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    #[inline(always)]
    unsafe fn dots<V: Vector, const C: usize, const R: usize>(
        &self,
        first: usize,
        start: usize,
        xs: [&[f32]; R],
    ) -> [[f32; R]; C] {
        let len = xs[0].len();
        assert!(xs.iter().all(|xs| xs.len() == len) && len.is_multiple_of(B::VALUES));
        let rows: [_; C] = std::array::from_fn(|col| self.blocks(first + col, start, len).as_ptr());
        // SAFETY: as promised by the caller; the rows have so many blocks, and each of `xs` their values.
        unsafe {
            let mut sums = [[V::splat(0.0); R]; C];
            for block in 0..len / B::VALUES {
                let blocks = rows.map(|row| row.add(block * B::BYTES));
                let factors: [B::Factors; C] = std::array::from_fn(
                    #[inline(always)]
                    |col| {
                        self.prefetch_after(blocks[col]);
                        B::factors::<V>(blocks[col])
                    },
                );
                // Of the columns these take turns, so that the sums of one need not wait for each other.
                for step in 0..B::VALUES / B::STEP {
                    for col in 0..C {
                        let (sums, first) = (&mut sums[col], block * B::VALUES);
                        B::step::<V>(
                            blocks[col],
                            &factors[col],
                            step,
                            #[inline(always)]
                            |at, weights| {
                                for row in 0..R {
                                    let xs = V::load(xs[row].as_ptr().add(first + at));
                                    sums[row] = weights.times_plus(xs, sums[row]);
                                }
                            },
                        );
                    }
                }
            }
            lane_sums(sums)
        }
    }

    #[inline(always)]
    unsafe fn unpack<V: Vector>(&self, row: usize, start: usize, values: &mut [f32]) {
        let blocks = self.blocks(row, start, values.len());
        let blocks = blocks.chunks_exact(B::BYTES);
        for (values, block) in values.chunks_exact_mut(B::VALUES).zip(blocks) {
            let block = block.as_ptr();
            self.prefetch_after(block);
            // SAFETY: as promised by the caller; there is room for the values of a block.
            unsafe {
                let factors = B::factors::<V>(block);
                for step in 0..B::VALUES / B::STEP {
                    B::step::<V>(
                        block,
                        &factors,
                        step,
                        #[inline(always)]
                        |at, weights| weights.store(values.as_mut_ptr().add(at)),
                    );
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{BlockFormat, PART, Q4KBlocks, Q8Blocks, RowsOfBlocks};
    use crate::cpu::element::Element;
    use crate::cpu::vector::{Kernel, Vector, run_each};
    use crate::product::few_rows::WeightRows;
    use half::f16;

    const LEN: usize = 512;

    struct Dots<'a, B> {
        weight: &'a RowsOfBlocks<'a, B>,
        first: usize,
        xs: &'a [f32],
    }

    impl<B: BlockFormat> Kernel for Dots<'_, B> {
        type Output = [[f32; 2]; 4];

        #[inline(always)]
        unsafe fn run<V: Vector>(self) -> [[f32; 2]; 4] {
            let xs = [&self.xs[..LEN], &self.xs[LEN..2 * LEN]];
            // SAFETY: as promised by the caller.
            unsafe { self.weight.dots::<V, 4, 2>(self.first, 0, xs) }
        }
    }

    fn factor(block: &[u8], at: usize) -> f64 {
        f16::from_le_bytes([block[at], block[at + 1]])
            .widen()
            .into()
    }

    /// What a value is the difference of.
    fn q8_value(block: &[u8], i: usize) -> [f64; 2] {
        [
            f64::from(block[2 + i].cast_signed()) * factor(block, 0),
            0.0,
        ]
    }

    /// As the format packs scales and minimums of 6 bits.
    fn q4k_value(block: &[u8], i: usize) -> [f64; 2] {
        let (part, bytes) = (i / PART, &block[4..]);
        let [scale, min] = match part {
            0..4 => [bytes[part] & 63, bytes[part + 4] & 63],
            _ => [
                bytes[part + 4] & 15 | bytes[part - 4] >> 6 << 4,
                bytes[part + 4] >> 4 | bytes[part] >> 6 << 4,
            ],
        };
        let code = block[16 + part / 2 * PART + i % PART] >> (part % 2 * 4) & 15;
        [
            factor(block, 0) * f64::from(scale) * f64::from(code),
            factor(block, 2) * f64::from(min),
        ]
    }

    fn check<B: BlockFormat>(value: fn(&[u8], usize) -> [f64; 2]) {
        let random = |i: usize| ((i * 2_654_435_761) >> 13) as u8;
        let row_bytes = LEN / B::VALUES * B::BYTES;
        let mut bytes: Vec<u8> = (0..8 * row_bytes).map(random).collect();
        for block in bytes.chunks_mut(B::BYTES) {
            // Any bits but those of factors that are no numbers.
            block[1] &= 0xbf;
            block[3] &= 0xbf;
        }
        let weight = RowsOfBlocks::<B>::new(&bytes, LEN);
        let xs: Vec<f32> = (0..2 * LEN)
            .map(|i| f32::from(random(i + 7)) / 100.0 - 1.2)
            .collect();
        for first in [0, 4] {
            let dots = || Dots {
                weight: &weight,
                first,
                xs: &xs,
            };
            for dots in run_each(dots) {
                for (i, got) in dots.into_iter().flatten().enumerate() {
                    let (row, xs) = (first + i / 2, &xs[i % 2 * LEN..]);
                    let (mut want, mut magnitude) = (0f64, 0f64);
                    for (k, x) in xs[..LEN].iter().enumerate() {
                        let block = &bytes[row * row_bytes..][k / B::VALUES * B::BYTES..];
                        let terms = value(block, k % B::VALUES).map(|term| term * f64::from(*x));
                        want += terms[0] - terms[1];
                        magnitude += terms[0].abs() + terms[1].abs();
                    }
                    let error = (f64::from(got) - want).abs();
                    assert!(error <= 4e-6 * magnitude, "{i}: {got} {want}");
                }
            }
        }
    }

    #[test]
    fn products_are_those_of_the_values_of_the_format() {
        check::<Q8Blocks>(q8_value);
        check::<Q4KBlocks>(q4k_value);
    }
}
