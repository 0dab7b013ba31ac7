//! An f32 as the nearest bf16 and what rounding took from it, 16 bits each: the model's weight is then half of its own master, which
//! takes 2 bytes more in place of 4 (Kalamkar et al. 2020, arXiv:2005.04680, who cut the value where we round it).

use crate::cpu::element::Element;
use half::bf16;

/// The nearest bf16 of a master, and its remainder: the difference of their bits as integers, in the master's last places.
///
/// The only remainder that does not fit, of a value in the middle of two bf16 of which the one nearer to zero is even, becomes the
/// next one: that master loses one unit in its last place.
#[inline(always)]
pub fn split_master(master: f32) -> (bf16, i16) {
    let weight = <bf16 as Element>::nearest(master);
    let remainder = master.to_bits().wrapping_sub(upper_half(weight)) as i32;
    (weight, remainder.min(i32::from(i16::MAX)) as i16)
}

/// The master of a weight and its remainder, or, after the weight was given another value, one that is not nearer to any other weight.
#[inline(always)]
pub fn join_master(weight: bf16, remainder: i16) -> f32 {
    let upper = upper_half(weight);
    // A zero never has a remainder below zero, but one that was put in may find it there: nothing is smaller.
    let least = if upper << 1 == 0 { 0 } else { i16::MIN };
    f32::from_bits(upper.wrapping_add_signed(i32::from(remainder.max(least))))
}

#[inline(always)]
fn upper_half(weight: bf16) -> u32 {
    u32::from(weight.to_bits()) << 16
}

#[cfg(test)]
mod tests {
    use super::{join_master, split_master};
    use crate::cpu::element::Element;
    use half::bf16;

    #[test]
    fn a_weight_that_was_put_in_keeps_its_value() {
        for bits in (0..=u16::MAX).filter(|bits| bf16::from_bits(*bits).is_finite()) {
            let weight = bf16::from_bits(bits);
            for remainder in [i16::MIN, -1, 0, 1, i16::MAX] {
                let (rounded, _) = split_master(join_master(weight, remainder));
                // In the middle of two weights the even one is taken.
                let is_tie = remainder == i16::MIN && bits % 2 == 1;
                assert!(rounded == weight || is_tie, "{weight} {remainder}");
            }
        }
    }

    /// All upper halves, with the lower ones at which something changes and some others.
    #[test]
    fn a_master_is_its_weight_and_the_remainder() {
        for upper in 0..=u16::MAX {
            for lower in [0, 1, 0x1234, 0x7fff, 0x8000, 0x8001, 0xabcd, 0xffff] {
                let master = f32::from_bits(u32::from(upper) << 16 | lower);
                let (weight, remainder) = split_master(master);
                let joined = join_master(weight, remainder);
                if master.is_nan() {
                    assert!(joined.is_nan());
                    continue;
                }
                assert_eq!(weight, bf16::nearest(master));
                let is_even = upper % 2 == 0;
                let lost = u32::from(lower == 0x8000 && is_even);
                assert_eq!(joined.to_bits(), master.to_bits() - lost);
                // What was split once is exact from then on.
                assert_eq!(split_master(joined), (weight, remainder));
            }
        }
    }
}
