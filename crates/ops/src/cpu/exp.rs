//! An exponential that the compiler can turn into vector instructions; the one of libm is a call per element.

/// `e^x` to about 2 units in the last place: `2^n * e^r`, `n = round(x / ln 2)`, `|r| <= ln 2 / 2`.
///
/// Below -87.33 (where f32 turns subnormal) it is 0, above 88.37 infinity; NaN stays NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const LOWEST: f32 = -87.336_54;
    const HIGHEST: f32 = 88.376_26;
    // 1.5 * 2^23: adding it rounds to an integer and leaves that integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // The high part has 9 zero bits at its end, so n * LN2_HIGH is exact.
    const LN2_HIGH: f32 = 0.693_145_75;
    const LN2_LOW: f32 = 1.428_606_8e-6;
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let tail = 1.0 / 120.0 + r * (1.0 / 720.0 + r * (1.0 / 5040.0));
    let p = 1.0 + (r + r * r * (0.5 + r * (1.0 / 6.0 + r * (1.0 / 24.0 + r * tail))));
    let power = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    let y = p * power;
    let y = if x > HIGHEST { f32::INFINITY } else { y };
    if x < LOWEST { 0.0 } else { y }
}

#[cfg(test)]
mod tests {
    use super::exp;

    #[test]
    fn exp_is_within_three_ulp_of_f64_and_saturates() {
        let worst = (-873_000i32..883_000)
            .map(|i| i as f32 * 1e-4)
            .map(|x| ((exp(x) as f64 - (x as f64).exp()) / (x as f64).exp()).abs())
            .fold(0f64, f64::max);
        assert!(
            worst < 3.0 * f32::EPSILON as f64,
            "worst relative error {worst:e}"
        );
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-100.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(100.0), f32::INFINITY);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }
}
