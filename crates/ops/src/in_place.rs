//! Changing the values of a tensor where they are.

use crate::host::HostF32;
use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Tensor, bail};

/// Lets `change` write the values of `xs`, the argument `what` of the operation `op`, and returns the tensor.
///
/// Every tensor that shares the storage of `xs` changes with it; values that are not contiguous are copied first.
pub(crate) fn in_place(
    op: &'static str,
    what: &str,
    xs: Tensor,
    change: impl Fn(&mut [f32]),
) -> Result<Tensor> {
    let xs = HostF32::new(op, what, &xs)?.into_tensor();
    if xs.elem_count() > 0 {
        xs.inplace_op1(&Change { op, change })?;
    }
    Ok(xs)
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
            _ => bail!("{}: expected contiguous f32 values", self.op),
        }
    }
}
