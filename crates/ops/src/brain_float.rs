//! Between bf16 in memory and the f32 that every kernel computes in: widening is exact, rounding is to the nearest,
//! ties to even.

use crate::chunks::{for_each_chunk, rows_per_chunk};
use crate::filled::filled;
use crate::vectorised::vectorised;
use half::bf16;

/// The values in f32, written by all threads.
pub(crate) fn widened(values: &[bf16]) -> Vec<f32> {
    let len = rows_per_chunk(1);
    filled(values.len(), len, values.len(), |chunk, wide| {
        let values = &values[chunk * len..][..wide.len()];
        vectorised(
            #[inline(always)]
            || {
                for (wide, value) in wide.iter_mut().zip(values) {
                    *wide = f32::from_bits(u32::from(value.to_bits()) << 16);
                }
            },
        );
    })
}

/// The values in bf16, written by all threads.
pub(crate) fn rounded(values: &[f32]) -> Vec<bf16> {
    let mut narrow = vec![bf16::ZERO; values.len()];
    round_into(&mut narrow, values);
    narrow
}

/// Overwrites `narrow` with as many values, rounded, on all threads.
pub(crate) fn round_into(narrow: &mut [bf16], values: &[f32]) {
    let (len, work) = (rows_per_chunk(1), values.len());
    for_each_chunk(narrow, len, work, |chunk, narrow| {
        let values = &values[chunk * len..][..narrow.len()];
        vectorised(
            #[inline(always)]
            || {
                for (narrow, value) in narrow.iter_mut().zip(values) {
                    *narrow = bf16::from_bits(rounded_bits(*value));
                }
            },
        );
    });
}

/// Adding just under half of the last place that stays, and the bit there, carries into it exactly when rounding up is
/// due. A NaN stays one.
#[inline(always)]
fn rounded_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let quiet_nan = bits >> 16 | 0x40;
    let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
    (if is_nan { quiet_nan } else { nearest }) as u16
}

#[cfg(test)]
mod tests {
    use super::{rounded, widened};
    use half::bf16;

    #[test]
    fn every_value_comes_back_and_its_neighbours_round_to_the_nearest() {
        let all: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
        let wide = widened(&all);
        // Around each value: the halves between it and the next, and the smallest steps beside them.
        let near = |step: u32| -> Vec<f32> {
            let bits = wide.iter().map(|x| x.to_bits().wrapping_add(step));
            bits.map(f32::from_bits).collect()
        };
        for step in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
            for (value, got) in near(step).into_iter().zip(rounded(&near(step))) {
                let want = bf16::from_f32(value);
                let same_nan = want.is_nan() && got.is_nan();
                assert!(
                    got == want && got.is_sign_negative() == want.is_sign_negative() || same_nan,
                    "{value:e}"
                );
            }
        }
    }
}
