//! Values on the GPU: those of a tensor, and new ones.

#![allow(unsafe_code)]

use super::pointer::{In, Out};
use crate::host::op_output::OpOutput;
use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DeviceRepr};
use candle_core::{
    CudaDevice, CudaStorage, Layout, Result, Shape, Storage, StorageRef, Tensor, bail,
};
use std::mem::size_of;

/// The values of a tensor under candle's read lock.
pub(crate) struct GpuValues<'a> {
    _guard: StorageRef<'a>,
    address: u64,
}

impl<'a> GpuValues<'a> {
    /// Those of a contiguous tensor on a GPU.
    pub(crate) fn new<T: CudaDType>(tensor: &'a Tensor) -> Result<Self> {
        let (guard, layout) = tensor.storage_and_layout();
        let address = match &*guard {
            Storage::Cuda(storage) => address::<T>(storage, layout)?,
            _ => bail!("expected values on CUDA"),
        };
        Ok(Self {
            _guard: guard,
            address,
        })
    }

    /// The values; `T` is the type they were checked for.
    pub(crate) fn get<T>(&self) -> In<'_, T> {
        In::new(self.address)
    }
}

/// Of the first value of a layout.
pub(crate) fn address<T: CudaDType>(storage: &CudaStorage, layout: &Layout) -> Result<u64> {
    let slice = storage.as_cuda_slice::<T>()?;
    // Everything on this device is on one stream, so there is no event to wait for or record.
    let (start, _) = slice.device_ptr(slice.stream());
    Ok(start + (layout.start_offset() * size_of::<T>()) as u64)
}

/// New values on the GPU.
pub(crate) struct Fresh<T> {
    slice: CudaSlice<T>,
    device: CudaDevice,
}

impl<T: CudaDType + DeviceRepr> Fresh<T> {
    pub(crate) fn new(device: &CudaDevice, len: usize) -> Result<Self> {
        // SAFETY: the callers' kernels or copies write every value before anything reads it. An allocation of nothing is
        // an error to CUDA.
        let slice = unsafe { device.alloc::<T>(len.max(1)) };
        let slice = slice.map_err(|err| {
            let bytes = len * size_of::<T>();
            err.context(format!("asking for {bytes} bytes of the GPU's memory"))
        })?;
        Ok(Self {
            slice,
            device: device.clone(),
        })
    }

    /// Where a copy from the host goes.
    pub(crate) fn slice_mut(&mut self) -> &mut CudaSlice<T> {
        &mut self.slice
    }

    /// Where a kernel writes.
    pub(crate) fn out(&self) -> Out<'_, T> {
        let (start, _) = self.slice.device_ptr(self.slice.stream());
        Out::new(start)
    }

    /// The values as what an operation returns.
    pub(crate) fn into_output(self, shape: impl Into<Shape>) -> OpOutput {
        OpOutput::on_cuda(CudaStorage::wrap_cuda_slice(self.slice, self.device), shape)
    }

    /// The values as a tensor outside any graph.
    pub(crate) fn into_tensor(self, shape: impl Into<Shape>) -> Tensor {
        self.into_output(shape).into_tensor()
    }
}
