//! Types of values, as candle's storages in host memory hold them.

use candle_core::{CpuStorage, WithDType};
use half::{bf16, f16};

/// A type of values that a storage may hold.
pub(crate) trait HostValue: WithDType {
    fn of(storage: &mut CpuStorage) -> Option<&mut [Self]>;
}

macro_rules! host_values {
    ($($value:ty, $dtype:ident;)*) => {
        $(impl HostValue for $value {
            fn of(storage: &mut CpuStorage) -> Option<&mut [Self]> {
                match storage {
                    CpuStorage::$dtype(values) => Some(values),
                    _ => None,
                }
            }
        })*
    };
}

host_values! {
    f32, F32;
    f64, F64;
    bf16, BF16;
    f16, F16;
    i16, I16;
}
