//! Reading tensors in host memory: the check that each kernel makes first, and the slice it then works on.

use candle_core::{Device, Result, Storage, StorageRef, Tensor, WithDType, bail};
use std::marker::PhantomData;
use std::ops::Deref;

/// A contiguous, detached tensor of `T` on the CPU.
pub(crate) struct Host<T>(Tensor, PhantomData<T>);

impl<T: WithDType> Host<T> {
    /// Checks `tensor`, the argument `what` of the operation `op`; copies it only if it is not contiguous.
    pub(crate) fn new(op: &str, what: &str, tensor: &Tensor) -> Result<Self> {
        if !matches!(tensor.device(), Device::Cpu) || tensor.dtype() != T::DTYPE {
            bail!(
                "{op}: {what} must be a {:?} tensor on the CPU, got dtype {:?} on device {:?}\nhint: convert it with to_dtype or move it with to_device",
                T::DTYPE,
                tensor.dtype(),
                tensor.device().location()
            )
        }
        Ok(Self(detached(tensor)?, PhantomData))
    }

    /// Locks the values for reading.
    pub(crate) fn read(&self) -> HostValues<'_, T> {
        HostValues::new(&self.0)
    }
}

/// The values of `tensor` outside of any graph, copied only if they are not contiguous. Nothing is contiguous whatever its
/// strides, and no allocation of it is asked of a GPU, to which that would be an error.
///
/// # Errors
/// Values that are not in memory: behind the tensor is a storage of another type then, such as the empty one of F4 that stands for
/// those of a parameter which were released.
pub(crate) fn detached(tensor: &Tensor) -> Result<Tensor> {
    let stored = tensor.storage_and_layout().0.dtype();
    if stored != tensor.dtype() {
        bail!(
            "the values of a tensor of shape {:?} are not in memory: expected {:?}, got {stored:?}",
            tensor.shape(),
            tensor.dtype()
        )
    }
    match tensor.elem_count() {
        0 => Ok(tensor.detach()),
        _ => tensor.detach().contiguous(),
    }
}

/// The values of a tensor, in row-major order, under candle's read lock.
pub(crate) struct HostValues<'a, T> {
    guard: StorageRef<'a>,
    start: usize,
    len: usize,
    of: PhantomData<T>,
}

impl<'a, T: WithDType> HostValues<'a, T> {
    /// Those of a contiguous tensor of `T`.
    pub(crate) fn new(tensor: &'a Tensor) -> Self {
        let (guard, layout) = tensor.storage_and_layout();
        let (start, len) = (layout.start_offset(), layout.shape().elem_count());
        // A view of nothing may begin behind the end.
        let start = if len == 0 { 0 } else { start };
        Self {
            guard,
            start,
            len,
            of: PhantomData,
        }
    }
}

impl<T: WithDType> Deref for HostValues<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // Device and dtype were checked when the tensor was wrapped, so only the first arm is ever taken.
        match &*self.guard {
            Storage::Cpu(storage) => {
                let values = T::cpu_storage_as_slice(storage).unwrap_or_default();
                &values[self.start..self.start + self.len]
            }
            _ => &[],
        }
    }
}
