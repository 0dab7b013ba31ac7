//! The element types of the kernels, random values of them, and how close a result must be.

use half::{bf16, f16};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// One rounding to f32.
pub const F32: f64 = 1.0 / (1u64 << 24) as f64;

pub trait Element: Copy + Default + PartialEq + std::fmt::Debug {
    /// Largest relative error of one rounding to this type.
    const ROUNDING: f64;
    /// Largest error of rounding a subnormal number.
    const SUBNORMAL_ROUNDING: f64 = 0.0;

    fn from_f64(x: f64) -> Self;
    fn to_f64(self) -> f64;
}

impl Element for f32 {
    const ROUNDING: f64 = F32;

    fn from_f64(x: f64) -> Self {
        x as f32
    }

    fn to_f64(self) -> f64 {
        f64::from(self)
    }
}

impl Element for bf16 {
    // Eight significant bits: half a unit in the last place of 1 is 2^-8.
    const ROUNDING: f64 = 1.0 / 256.0;

    fn from_f64(x: f64) -> Self {
        bf16::from_f64(x)
    }

    fn to_f64(self) -> f64 {
        f64::from(self)
    }
}

impl Element for f16 {
    // Eleven significant bits, and none below 2^-24.
    const ROUNDING: f64 = 1.0 / 2048.0;
    const SUBNORMAL_ROUNDING: f64 = 1.0 / (1u64 << 25) as f64;

    fn from_f64(x: f64) -> Self {
        f16::from_f64(x)
    }

    fn to_f64(self) -> f64 {
        f64::from(self)
    }
}

pub fn rng(seed: usize) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed as u64)
}

/// Values of both signs, up to `size`.
pub fn random<T: Element>(rng: &mut ChaCha8Rng, len: usize, size: f64) -> Vec<T> {
    (0..len)
        .map(|_| T::from_f64(rng.random_range(-size..size)))
        .collect()
}

pub fn to_f64<T: Element>(values: &[T]) -> Vec<f64> {
    values.iter().map(|x| x.to_f64()).collect()
}

pub fn from_f64<T: Element>(values: &[f64]) -> Vec<T> {
    values.iter().map(|&x| T::from_f64(x)).collect()
}

/// Each value may be off by its last rounding, and by `num_roundings` f32 roundings of the largest expected value.
pub fn assert_close<T: Element>(what: &str, got: &[T], want: &[f64], num_roundings: f64) {
    let largest = want.iter().fold(0f64, |largest, x| largest.max(x.abs()));
    assert_close_at(what, got, want, num_roundings * largest);
}

/// Each value may be off by its last rounding, and by the f32 rounding of a number of the size `summed`: that of what
/// is added up, where the result may cancel to less.
pub fn assert_close_at<T: Element>(what: &str, got: &[T], want: &[f64], summed: f64) {
    assert_eq!(got.len(), want.len(), "{what}: number of values");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let bound = 1.001 * T::ROUNDING * want.abs() + T::SUBNORMAL_ROUNDING + F32 * summed;
        let error = (got.to_f64() - want).abs();
        assert!(
            error <= bound,
            "{what}: element {i} is {got:?}, expected {want} +- {bound:e}, error {error:e}"
        );
    }
}
