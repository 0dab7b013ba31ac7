//! Adding to, or overwriting, f32 values that exist.

use crate::chunks::{for_each_chunk, rows_per_chunk};
use crate::dispatch::on_cuda;
use crate::host_floats::HostFloats;
use crate::in_place::{len_must_be, must_not_share, write};
use candle_core::{Result, Tensor};

const NAME: &str = "add_into";

/// Writes, or adds if `add`, `values` to `dst`; outside any graph. Values of bf16 are widened.
///
/// # Shapes
/// `dst` as many values as `values`, in row-major order, f32, contiguous; `values` f32 or bf16.
///
/// # Errors
/// When the numbers of values differ, the two share a storage, `values` is not f32 or bf16, or the two are on different devices.
pub fn add_into(dst: &Tensor, add: bool, values: &Tensor) -> Result<()> {
    len_must_be(NAME, dst, values.elem_count())?;
    must_not_share(NAME, dst, values)?;
    on_cuda!(dst => crate::cuda::add_into(dst, add, values));
    let values = HostFloats::new(NAME, "values", values)?;
    let values = values.read();
    write(NAME, "dst", dst, values.len(), |dst| {
        add_values(dst, add, &values);
    })
}

fn add_values(dst: &mut [f32], add: bool, values: &[f32]) {
    let (len, work) = (rows_per_chunk(1), dst.len());
    for_each_chunk(dst, len, work, |chunk, dst| {
        let values = &values[chunk * len..][..dst.len()];
        if add {
            for (dst, value) in dst.iter_mut().zip(values) {
                *dst += value;
            }
        } else {
            dst.copy_from_slice(values);
        }
    });
}
