//! The types that kernels compute with.

use candle_core::WithDType;
use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use half::{bf16, f16};

/// A type that kernels have an instance for: the instance's name ends in `_` and the type's name.
pub(crate) trait Element: CudaDType + DeviceRepr + WithDType {}

impl Element for f32 {}
impl Element for bf16 {}
impl Element for f16 {}

/// Evaluates an expression with `$t` being the type of `$tensor`'s values, f32, bf16 or f16.
macro_rules! by_dtype {
    ($op:expr, $what:expr, $tensor:expr, $t:ident => $expression:expr) => {
        match $tensor.dtype() {
            candle_core::DType::F32 => {
                type $t = f32;
                $expression
            }
            candle_core::DType::BF16 => {
                type $t = half::bf16;
                $expression
            }
            candle_core::DType::F16 => {
                type $t = half::f16;
                $expression
            }
            dtype => candle_core::bail!(
                "{}: {} must be an F32, BF16 or F16 tensor, got dtype {dtype:?} on device {:?}\nhint: convert it with to_dtype",
                $op,
                $what,
                $tensor.device().location()
            ),
        }
    };
}
pub(crate) use by_dtype;
