//! The types that weights and activations have. Every operation is written once for all of them: it widens a value where it reads it, computes
//! in f32, and rounds where it writes, so that what travels to and from memory is never wider than the tensors are.

#[cfg(target_arch = "x86_64")]
use super::avx512::Lanes;
use super::host_value::HostValue;

/// Only on x86 do products pack the values themselves.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) trait Lanes {}
#[cfg(not(target_arch = "x86_64"))]
impl<T> Lanes for T {}

/// f32, bf16 or f16.
pub(crate) trait Element: HostValue + Lanes {
    /// The value in f32, exactly.
    fn widen(self) -> f32;

    /// The nearest value, ties to even.
    fn nearest(value: f32) -> Self;
}

impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn nearest(value: f32) -> Self {
        value
    }
}

/// Evaluates an expression with `$t` being the type of values of `$dtype`, that of a `HostFloats`.
macro_rules! by_float {
    ($dtype:expr, $t:ident => $expression:expr) => {
        match $dtype {
            candle_core::DType::BF16 => {
                type $t = half::bf16;
                $expression
            }
            candle_core::DType::F16 => {
                type $t = half::f16;
                $expression
            }
            _ => {
                type $t = f32;
                $expression
            }
        }
    };
}
pub(crate) use by_float;
