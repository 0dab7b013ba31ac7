//! Converting and adding, value by value, into memory that exists.

use crate::cpu::chunks::{for_each_chunk, rows_per_chunk};
use crate::cpu::element::{Element, by_float};
use crate::cpu::half_precision::{
    add_values, by_half_precision, round_into as round_values, widen_values,
};
use crate::host::floats::HostFloats;
use crate::host::in_place::{len_must_be, must_not_share, write};
use crate::host::on_cuda::on_cuda;
use crate::host::values::Host;
use candle_core::{Result, Tensor};

/// Writes, or adds if `add`, `values` to `dst`; outside any graph. Values of bf16 and f16 are widened.
///
/// # Shapes
/// `dst` as many values as `values`, in row-major order, f32, contiguous; `values` f32, bf16 or f16.
///
/// # Errors
/// When the numbers of values differ, the two share a storage, `values` is not f32, bf16 or f16, or the two are on different devices.
pub fn add_into(dst: &Tensor, add: bool, values: &Tensor) -> Result<()> {
    let op = "add_into";
    len_must_be(op, dst, values.elem_count())?;
    must_not_share(op, dst, values)?;
    on_cuda!(dst => super::elements_gpu::add_into(dst, add, values));
    let _timer = crate::timing::op_timer::op(op);
    let values = HostFloats::new(op, "values", values)?;
    by_float!(values.dtype(), T => {
        let values = values.read_as::<T>();
        write(op, "dst", dst, values.len(), |dst: &mut [f32]| put(dst, add, &values))
    })
}

/// Overwrites `dst` with `values`, rounded to the nearest bf16 or f16, ties to even; outside any graph.
///
/// # Shapes
/// `dst`, bf16 or f16, contiguous, with as many values as `values`, f32, in row-major order.
///
/// # Errors
/// When the numbers of values differ, the two share a storage, `dst` is not contiguous, or a tensor has another dtype or device.
pub fn round_into(dst: &Tensor, values: &Tensor) -> Result<()> {
    let op = "round_into";
    len_must_be(op, dst, values.elem_count())?;
    must_not_share(op, dst, values)?;
    on_cuda!(dst => super::elements_gpu::round_into(dst, values));
    let _timer = crate::timing::op_timer::op(op);
    let values = Host::<f32>::new(op, "values", values)?;
    let values = values.read();
    by_half_precision!(op, "dst", dst, T => write(op, "dst", dst, values.len(), |dst: &mut [T]| {
        round_values(dst, &values);
    }))
}

fn put<T: Element>(dst: &mut [f32], add: bool, values: &[T]) {
    let (len, work) = (rows_per_chunk(1), dst.len());
    for_each_chunk(dst, len, work, |chunk, dst| {
        let values = &values[chunk * len..][..dst.len()];
        if add {
            add_values(dst, values);
        } else {
            widen_values(dst, values);
        }
    });
}
