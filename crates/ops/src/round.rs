//! From f32 to bf16 in memory that exists.

use crate::brain_float::round_into as round_values;
use crate::dispatch::on_cuda;
use crate::host::HostF32;
use crate::in_place::{len_must_be, must_not_share, write};
use candle_core::{Result, Tensor};

const NAME: &str = "round_into";

/// Overwrites `dst` with `values`, rounded to the nearest bf16, ties to even; outside any graph.
///
/// # Shapes
/// `dst`, bf16, contiguous, with as many values as `values`, f32, in row-major order.
///
/// # Errors
/// When the numbers of values differ, the two share a storage, `dst` is not contiguous, or a tensor has another dtype or device.
pub fn round_into(dst: &Tensor, values: &Tensor) -> Result<()> {
    len_must_be(NAME, dst, values.elem_count())?;
    must_not_share(NAME, dst, values)?;
    on_cuda!(dst => crate::cuda::round_into(dst, values));
    let values = HostF32::new(NAME, "values", values)?;
    let values = values.read();
    write(NAME, "dst", dst, values.len(), |dst| {
        round_values(dst, &values);
    })
}
