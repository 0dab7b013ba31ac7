//! Changing the values of a tensor where they are.

use crate::brain_float::{round_into, widened};
use crate::host_floats::HostFloats;
use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Result, Tensor, bail};
use std::cell::Cell;

/// Lets `change` write the values of `xs`, the argument `what` of the operation `op`, and returns the tensor. Values of
/// bf16 are widened for it and rounded back.
///
/// Every tensor that shares the storage of `xs` changes with it; values that are not contiguous are copied first.
pub(crate) fn in_place(
    op: &'static str,
    what: &str,
    xs: Tensor,
    change: impl Fn(&mut [f32]),
) -> Result<Tensor> {
    let xs = HostFloats::new(op, what, &xs)?.into_tensor();
    if xs.elem_count() > 0 {
        xs.inplace_op1(&Change { op, change })?;
    }
    Ok(xs)
}

/// Lets `write` fill or change the `len` values of `dst`, the f32 buffer that the operation `op` writes to, such as a view
/// of a larger one.
///
/// # Errors
/// When `dst` has another number of values, is not contiguous, or is not f32 or bf16 on the CPU.
pub(crate) fn write(
    op: &'static str,
    dst: &Tensor,
    len: usize,
    write: impl FnOnce(&mut [f32]),
) -> Result<()> {
    if dst.elem_count() != len {
        bail!(
            "{op}: expected a buffer of {len} values, got {}",
            dst.elem_count()
        )
    }
    if dst.dtype() != DType::F32 || !dst.device().is_cpu() || !dst.is_contiguous() {
        bail!(
            "{op}: the buffer must be contiguous f32 on the CPU, got dtype {:?} on device {:?} with strides {:?}",
            dst.dtype(),
            dst.device().location(),
            dst.stride()
        )
    }
    if len == 0 {
        return Ok(());
    }
    dst.inplace_op1(&Write {
        op,
        write: Cell::new(Some(write)),
    })
}

/// Calls a function with the values of a buffer, once.
struct Write<F> {
    op: &'static str,
    write: Cell<Option<F>>,
}

impl<F: FnOnce(&mut [f32])> InplaceOp1 for Write<F> {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        match (storage, layout.contiguous_offsets(), self.write.take()) {
            (CpuStorage::F32(values), Some((start, end)), Some(write)) => {
                write(&mut values[start..end]);
                Ok(())
            }
            _ => bail!("{}: expected contiguous f32 values", self.op),
        }
    }
}

struct Change<F> {
    op: &'static str,
    change: F,
}

impl<F: Fn(&mut [f32])> InplaceOp1 for Change<F> {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        match (storage, layout.contiguous_offsets()) {
            (CpuStorage::F32(values), Some((start, end))) => {
                (self.change)(&mut values[start..end]);
                Ok(())
            }
            (CpuStorage::BF16(values), Some((start, end))) => {
                let mut wide = widened(&values[start..end]);
                (self.change)(&mut wide);
                round_into(&mut values[start..end], &wide);
                Ok(())
            }
            _ => bail!("{}: expected contiguous f32 or bf16 values", self.op),
        }
    }
}
