//! Changing the values of a tensor where they are.

use super::floats::HostFloats;
use crate::cpu::host_value::HostValue;
use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Storage, Tensor, bail};
use std::cell::Cell;
use std::marker::PhantomData;

/// Lets `change` write the values of `xs`, the argument `what` of the operation `op`, of type `T`, and returns the tensor.
///
/// Every tensor that shares the storage of `xs` changes with it; values that are not contiguous are copied first.
pub(crate) fn in_place<T: HostValue>(
    op: &'static str,
    what: &str,
    xs: Tensor,
    change: impl FnOnce(&mut [T]),
) -> Result<Tensor> {
    let xs = HostFloats::new(op, what, &xs)?.into_tensor();
    write(op, what, &xs, xs.elem_count(), change)?;
    Ok(xs)
}

/// Lets `write` fill or change the `len` values of `dst`, the argument `what` that the operation `op` writes to, such as a
/// view of a larger buffer.
///
/// # Errors
/// When `dst` has another number of values, is not contiguous, or is not of that dtype on the CPU.
pub(crate) fn write<T: HostValue>(
    op: &'static str,
    what: &str,
    dst: &Tensor,
    len: usize,
    write: impl FnOnce(&mut [T]),
) -> Result<()> {
    try_write(op, what, dst, len, |values| {
        write(values);
        Ok(())
    })
}

/// [`write`] with a function that may fail.
pub(crate) fn try_write<T: HostValue>(
    op: &'static str,
    what: &str,
    dst: &Tensor,
    len: usize,
    write: impl FnOnce(&mut [T]) -> Result<()>,
) -> Result<()> {
    if dst.elem_count() != len {
        bail!(
            "{op}: expected {what} of {len} values, got {}",
            dst.elem_count()
        )
    }
    if dst.dtype() != T::DTYPE || !dst.device().is_cpu() || !dst.is_contiguous() {
        bail!(
            "{op}: {what} must be contiguous {:?} on the CPU, got dtype {:?} on device {:?} with strides {:?}",
            T::DTYPE,
            dst.dtype(),
            dst.device().location(),
            dst.stride()
        )
    }
    if len == 0 {
        return Ok(());
    }
    dst.inplace_op1(&Write::<T, _> {
        op,
        write: Cell::new(Some(write)),
        of: PhantomData,
    })
}

/// An error unless `dst`, the buffer that `op` writes to, has `len` values.
pub(crate) fn len_must_be(op: &str, dst: &Tensor, len: usize) -> Result<()> {
    if dst.elem_count() != len {
        bail!(
            "{op}: expected dst of {len} values, got {}",
            dst.elem_count()
        )
    }
    Ok(())
}

/// An error if `dst` and `values`, which are read while it is written, are views of one storage.
pub(crate) fn must_not_share(op: &str, dst: &Tensor, values: &Tensor) -> Result<()> {
    if same_storage(dst, values) {
        bail!("{op}: dst and values share a storage\nhint: copy the values first")
    }
    Ok(())
}

/// Whether two tensors are views of one storage: candle locks storages, so work on two views at a time would wait for
/// itself.
pub(crate) fn same_storage(a: &Tensor, b: &Tensor) -> bool {
    storage_address(a) == storage_address(b)
}

/// The same for all views of a storage, and for no other tensor that is alive.
pub(crate) fn storage_address(tensor: &Tensor) -> *const Storage {
    &*tensor.storage_and_layout().0
}

/// Calls a function with the values of a buffer, once.
struct Write<T, F> {
    op: &'static str,
    write: Cell<Option<F>>,
    of: PhantomData<T>,
}

impl<T: HostValue, F: FnOnce(&mut [T]) -> Result<()>> InplaceOp1 for Write<T, F> {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let parts = (T::of(storage), layout.contiguous_offsets());
        match (parts, self.write.take()) {
            ((Some(values), Some((start, end))), Some(write)) => write(&mut values[start..end]),
            _ => bail!("{}: expected contiguous {:?} values", self.op, T::DTYPE),
        }
    }
}
