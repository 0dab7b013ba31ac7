//! Between the types of 16 bits in memory, bf16 and f16, and the f32 that every kernel computes in: widening is exact, rounding is
//! to the nearest, ties to even. By bit operations that vectors have, so that every machine gives the same bits.

use super::chunks::{for_each_chunk, rows_per_chunk};
use super::element::Element;
use super::filled::filled;
use super::vectorised::vectorised;
use half::{bf16, f16};

impl Element for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    /// Adding just under half of the last place that stays, and the bit there, carries into it exactly when rounding up is
    /// due. A NaN stays one.
    #[inline(always)]
    fn nearest(value: f32) -> Self {
        let bits = value.to_bits();
        let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let quiet_nan = bits >> 16 | 0x40;
        Self::from_bits((if value.is_nan() { quiet_nan } else { nearest }) as u16)
    }
}

impl Element for f16 {
    /// With the bits at the places that f32 has for them, the exponent lacks 112: a product by 2^112, exact, also of what is
    /// subnormal. Infinity and NaN, which it would make finite, get f32's largest exponent.
    #[inline(always)]
    fn widen(self) -> f32 {
        let bits = u32::from(self.to_bits());
        let shifted = (bits & 0x7fff) << 13;
        let finite = (f32::from_bits(shifted) * f32::from_bits((127 + 112) << 23)).to_bits();
        let is_finite = bits & 0x7c00 != 0x7c00;
        let magnitude = if is_finite {
            finite
        } else {
            shifted | 0x7f80_0000
        };
        f32::from_bits(magnitude | (bits & 0x8000) << 16)
    }

    /// As for bf16, with an exponent that is less by 112. What is subnormal is rounded by a sum with 1/2, whose last place is that of
    /// subnormal f16. A carry out of the largest number makes infinity, as does anything larger.
    #[inline(always)]
    fn nearest(value: f32) -> Self {
        let bits = value.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let normal = magnitude
            .wrapping_add(0xfff + (magnitude >> 13 & 1))
            .wrapping_sub(112 << 23)
            >> 13;
        let subnormal = (f32::from_bits(magnitude) + 0.5)
            .to_bits()
            .wrapping_sub(0.5f32.to_bits());
        let rounded = if magnitude < (127 - 14) << 23 {
            subnormal
        } else {
            normal
        };
        let finite_or_infinite = if magnitude < (127 + 16) << 23 {
            rounded
        } else {
            0x7c00
        };
        let quiet_nan = magnitude >> 13 & 0x3ff | 0x7e00;
        let is_nan = magnitude > 0x7f80_0000;
        let rounded = if is_nan {
            quiet_nan
        } else {
            finite_or_infinite
        };
        Self::from_bits((rounded | bits >> 16 & 0x8000) as u16)
    }
}

/// Evaluates an expression with `$t` being the type of `$tensor`'s values, one of 16 bits.
macro_rules! by_half_precision {
    ($op:expr, $what:expr, $tensor:expr, $t:ident => $expression:expr) => {
        match $tensor.dtype() {
            candle_core::DType::BF16 => {
                type $t = half::bf16;
                $expression
            }
            candle_core::DType::F16 => {
                type $t = half::f16;
                $expression
            }
            dtype => candle_core::bail!(
                "{}: expected {} of BF16 or F16, got dtype {dtype:?} on device {:?}",
                $op,
                $what,
                $tensor.device().location()
            ),
        }
    };
}
pub(crate) use by_half_precision;

/// The values in f32, written by all threads.
pub(crate) fn widened<T: Element>(values: &[T]) -> Vec<f32> {
    let len = rows_per_chunk(1);
    filled(values.len(), len, values.len(), |chunk, wide| {
        widen_values(wide, &values[chunk * len..][..wide.len()]);
    })
}

/// The values in 16 bits, written by all threads.
pub(crate) fn rounded<T: Element>(values: &[f32]) -> Vec<T> {
    let mut narrow = vec![T::zero(); values.len()];
    round_into(&mut narrow, values);
    narrow
}

/// Overwrites `narrow` with as many values, rounded, on all threads.
pub(crate) fn round_into<T: Element>(narrow: &mut [T], values: &[f32]) {
    let (len, work) = (rows_per_chunk(1), values.len());
    for_each_chunk(narrow, len, work, |chunk, narrow| {
        let values = &values[chunk * len..][..narrow.len()];
        vectorised(
            #[inline(always)]
            || {
                for (narrow, value) in narrow.iter_mut().zip(values) {
                    *narrow = T::nearest(*value);
                }
            },
        );
    });
}

/// `dst += values`, which are as many, on the calling thread.
pub(crate) fn add_values<T: Element>(dst: &mut [f32], values: &[T]) {
    vectorised(
        #[inline(always)]
        || {
            for (dst, value) in dst.iter_mut().zip(values) {
                *dst += value.widen();
            }
        },
    );
}

/// `dst = values`, which are as many, on the calling thread.
pub(crate) fn widen_values<T: Element>(dst: &mut [f32], values: &[T]) {
    vectorised(
        #[inline(always)]
        || {
            for (dst, value) in dst.iter_mut().zip(values) {
                *dst = value.widen();
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::{rounded, widened};
    use crate::cpu::element::Element;
    use half::{bf16, f16};

    /// For every value, and for the steps between it and the next in f32 at which rounding turns.
    fn check<T: Element + PartialEq>(
        from_bits: fn(u16) -> T,
        from_f32: fn(f32) -> T,
        to_f32: fn(T) -> f32,
        dropped_bits: u32,
    ) {
        let all: Vec<T> = (0..=u16::MAX).map(from_bits).collect();
        let wide = widened(&all);
        let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
        for (value, wide) in all.iter().zip(&wide) {
            assert!(same(to_f32(*value), *wide), "{wide:e}");
        }
        let near = |step: u32| -> Vec<f32> {
            let bits = wide.iter().map(|x| x.to_bits().wrapping_add(step));
            bits.map(f32::from_bits).collect()
        };
        let half = 1 << (dropped_bits - 1);
        for step in [0, 1, half - 1, half, half + 1, 2 * half - 1] {
            for (value, got) in near(step).into_iter().zip(rounded::<T>(&near(step))) {
                assert!(same(to_f32(from_f32(value)), to_f32(got)), "{value:e}");
            }
        }
    }

    #[test]
    fn every_value_comes_back_and_its_neighbours_round_to_the_nearest() {
        check(bf16::from_bits, bf16::from_f32, bf16::to_f32, 16);
        check(f16::from_bits, f16::from_f32, f16::to_f32, 13);
    }

    /// Subnormal f16 drop more bits than others, and what is larger than any is infinite.
    #[test]
    fn f16_rounds_every_magnitude_as_the_half_crate_does() {
        for start in (0..1u32 << 31).step_by(1 << 23) {
            let values: Vec<f32> = (0..2048u32)
                .flat_map(|i| [i << 12, (i << 12) + 1, (i << 12 | 1 << 11).wrapping_sub(i)])
                .map(|step| f32::from_bits(start + step))
                .collect();
            for (value, got) in values.iter().zip(rounded::<f16>(&values)) {
                let want = f16::from_f32(*value);
                let both_nan = want.is_nan() && got.is_nan();
                assert!(got.to_bits() == want.to_bits() || both_nan, "{value:e}");
            }
        }
    }
}
