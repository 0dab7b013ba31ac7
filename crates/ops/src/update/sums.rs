//! Sums in f64, of losses and of the squares of gradients, without the host having to read or to send anything.

use crate::cpu::element::{Element, by_float};
use crate::cpu::vectorised::vectorised;
use crate::host::floats::HostFloats;
use crate::host::in_place::{must_not_share, write};
use crate::host::on_cuda::on_cuda;
use crate::host::values::detached;
use candle_core::{DType, Device, Result, Tensor, bail};
use rayon::prelude::*;

/// Values summed by one task; fixed, so that the bits do not depend on the number of threads.
const CHUNK: usize = 16 * 1024;
/// Sums that grow beside each other.
const LANES: usize = 32;

/// Writes, or adds if `add`, the sum of `xs` in f64 to `dst`; outside any graph.
///
/// # Shapes
/// `dst` one f64 value; `xs`, f32 or f64, of any shape, on the same device.
///
/// # Errors
/// When `dst` is not one f64 value, `xs` is neither f32 nor f64, or they are on different devices or share a storage.
pub fn sum_into(dst: &Tensor, add: bool, xs: &Tensor) -> Result<()> {
    let op = "sum_into";
    one_value(op, "dst", dst)?;
    let (dtype, device) = (xs.dtype(), xs.device());
    if !matches!(dtype, DType::F32 | DType::F64) || !device.same_device(dst.device()) {
        bail!(
            "{op}: expected xs of F32 or F64 on {:?}, got {dtype:?} on {:?}",
            dst.device().location(),
            device.location()
        )
    }
    must_not_share(op, dst, xs)?;
    on_cuda!(dst => super::sums_gpu::sum_into(dst, add, xs));
    let _timer = crate::timing::op_timer::op(op);
    let xs = detached(xs)?.to_dtype(DType::F64)?.flatten_all()?;
    let sum: f64 = xs.to_vec1::<f64>()?.iter().sum();
    write::<f64>(op, "dst", dst, 1, |dst| {
        dst[0] = if add { dst[0] + sum } else { sum };
    })
}

/// The sum of the squares of `xs` in f64, in an order that depends on the number of values alone; outside any graph.
///
/// # Shapes
/// `xs`, f32, bf16 or f16, of any shape -> one f64 value, a scalar on the device of `xs`.
///
/// # Errors
/// When `xs` is not f32, bf16 or f16.
pub fn sum_of_squares(xs: &Tensor) -> Result<Tensor> {
    on_cuda!(xs => super::sums_gpu::sum_of_squares(xs));
    let _timer = crate::timing::op_timer::op("sum_of_squares");
    Tensor::new(host_sum("sum_of_squares", xs)?, &Device::Cpu)
}

/// Writes, or adds if `add`, the sum of the squares of `xs` to `dst`; outside any graph.
///
/// # Shapes
/// `dst` one f64 value; `xs`, f32, bf16 or f16, of any shape, on the same device.
///
/// # Errors
/// When `dst` is not one f64 value, `xs` is not f32, bf16 or f16, or they are on different devices.
pub fn sum_of_squares_into(dst: &Tensor, add: bool, xs: &Tensor) -> Result<()> {
    let op = "sum_of_squares_into";
    one_value(op, "dst", dst)?;
    on_cuda!(dst => super::sums_gpu::sum_of_squares_into(dst, add, xs));
    let _timer = crate::timing::op_timer::op(op);
    let sum = host_sum(op, xs)?;
    write::<f64>(op, "dst", dst, 1, |dst| {
        dst[0] = if add { dst[0] + sum } else { sum };
    })
}

fn host_sum(op: &str, xs: &Tensor) -> Result<f64> {
    let xs = HostFloats::new(op, "xs", xs)?;
    let partial: Vec<f64> = by_float!(xs.dtype(), T => {
        let values = xs.read_as::<T>();
        values.par_chunks(CHUNK).map(square_sum).collect()
    });
    Ok(partial.iter().sum())
}

/// In lanes of their own, so that they fill vector registers; their number is fixed, so that the bits are.
fn square_sum<T: Element>(values: &[T]) -> f64 {
    vectorised(
        #[inline(always)]
        || {
            let mut sums = [0f64; LANES];
            let blocks = values.chunks(LANES);
            for block in blocks {
                for (sum, value) in sums.iter_mut().zip(block) {
                    let value = f64::from(value.widen());
                    *sum += value * value;
                }
            }
            sums.iter().sum()
        },
    )
}

fn one_value(op: &str, what: &str, tensor: &Tensor) -> Result<()> {
    if tensor.elem_count() != 1 || tensor.dtype() != DType::F64 {
        bail!(
            "{op}: expected {what} of one F64 value, got {:?} of {:?}",
            tensor.dims(),
            tensor.dtype()
        )
    }
    Ok(())
}
