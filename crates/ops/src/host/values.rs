//! Reading tensors in host memory: the check that each kernel makes first, and the slice it then works on.

use candle_core::{CpuStorage, DType, Device, Result, Storage, StorageRef, Tensor, bail};
use std::ops::Deref;

/// A contiguous, detached tensor of `f32` on the CPU.
#[derive(Clone)]
pub(crate) struct HostF32(Tensor);

/// A contiguous, detached tensor of `u32` on the CPU.
#[derive(Clone)]
pub(crate) struct HostU32(Tensor);

/// A contiguous, detached tensor of `u8` on the CPU.
#[derive(Clone)]
pub(crate) struct HostU8(Tensor);

fn checked(op: &str, what: &str, tensor: &Tensor, dtype: DType) -> Result<Tensor> {
    if !matches!(tensor.device(), Device::Cpu) || tensor.dtype() != dtype {
        bail!(
            "{op}: {what} must be a {dtype:?} tensor on the CPU, got dtype {:?} on device {:?}\nhint: convert it with to_dtype or move it with to_device",
            tensor.dtype(),
            tensor.device().location()
        )
    }
    detached(tensor)
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

impl HostF32 {
    /// Checks `tensor`, the argument `what` of the operation `op`; copies it only if it is not contiguous.
    pub(crate) fn new(op: &str, what: &str, tensor: &Tensor) -> Result<Self> {
        Ok(Self(checked(op, what, tensor, DType::F32)?))
    }

    /// Locks the values for reading.
    pub(crate) fn read(&self) -> HostValues<'_, f32> {
        HostValues::new(&self.0, |storage| match storage {
            CpuStorage::F32(values) => values,
            _ => &[],
        })
    }
}

impl HostU32 {
    /// Checks `tensor`, the argument `what` of the operation `op`; copies it only if it is not contiguous.
    pub(crate) fn new(op: &str, what: &str, tensor: &Tensor) -> Result<Self> {
        Ok(Self(checked(op, what, tensor, DType::U32)?))
    }

    pub(crate) fn tensor(&self) -> &Tensor {
        &self.0
    }

    /// Locks the values for reading.
    pub(crate) fn read(&self) -> HostValues<'_, u32> {
        HostValues::new(&self.0, |storage| match storage {
            CpuStorage::U32(values) => values,
            _ => &[],
        })
    }
}

impl HostU8 {
    /// Checks `tensor`, the argument `what` of the operation `op`; copies it only if it is not contiguous.
    pub(crate) fn new(op: &str, what: &str, tensor: &Tensor) -> Result<Self> {
        Ok(Self(checked(op, what, tensor, DType::U8)?))
    }

    /// Locks the values for reading.
    pub(crate) fn read(&self) -> HostValues<'_, u8> {
        HostValues::new(&self.0, |storage| match storage {
            CpuStorage::U8(values) => values,
            _ => &[],
        })
    }
}

/// The values of a tensor, in row-major order, under candle's read lock.
pub(crate) struct HostValues<'a, T> {
    guard: StorageRef<'a>,
    start: usize,
    len: usize,
    of_dtype: fn(&CpuStorage) -> &[T],
}

impl<'a, T> HostValues<'a, T> {
    /// The values that `of_dtype` finds in the storage of a contiguous tensor.
    pub(crate) fn new(tensor: &'a Tensor, of_dtype: fn(&CpuStorage) -> &[T]) -> Self {
        let (guard, layout) = tensor.storage_and_layout();
        let (start, len) = (layout.start_offset(), layout.shape().elem_count());
        // A view of nothing may begin behind the end.
        let start = if len == 0 { 0 } else { start };
        Self {
            guard,
            start,
            len,
            of_dtype,
        }
    }
}

impl<T> Deref for HostValues<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // Device and dtype were checked when the tensor was wrapped, so only the first arm is ever taken.
        match &*self.guard {
            Storage::Cpu(storage) => &(self.of_dtype)(storage)[self.start..self.start + self.len],
            _ => &[],
        }
    }
}
