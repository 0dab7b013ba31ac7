//! Asking the driver about a GPU, and libraries about themselves.

#![allow(unsafe_code)]

use super::gpu_state::GpuState;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::cublas::sys::{cublasGetProperty, libraryPropertyType};
use candle_core::cuda_backend::cudarc::driver::{result, sys};
use candle_core::{CudaDevice, Result};
use sys::CUmemPool_attribute;
use sys::CUmemPool_attribute::{CU_MEMPOOL_ATTR_USED_MEM_CURRENT, CU_MEMPOOL_ATTR_USED_MEM_HIGH};

/// Name and memory of a GPU. Memory is that of the driver's pool, from which all tensors come.
pub(crate) fn state(device: &CudaDevice) -> Result<GpuState> {
    let stream = device.cuda_stream();
    let context = stream.context();
    let (free, total) = context.mem_get_info().w()?;
    Ok(GpuState {
        name: context.name().w()?,
        libraries: libraries()?,
        used: used_bytes(device)?,
        peak: of_pool(device, CU_MEMPOOL_ATTR_USED_MEM_HIGH)?,
        free: free as u64,
        total: total as u64,
    })
}

/// What tensors hold.
pub(crate) fn used_bytes(device: &CudaDevice) -> Result<u64> {
    of_pool(device, CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
}

/// Bytes that the pool of all tensors has given out, now or at their peak.
fn of_pool(device: &CudaDevice, attribute: CUmemPool_attribute) -> Result<u64> {
    let stream = device.cuda_stream();
    let mut bytes = 0u64;
    // SAFETY: the device is open, so its handle is valid and its default pool lives as long as it; both attributes that are asked for are
    // 64-bit counts of bytes, written during the call.
    unsafe {
        let pool = result::device::get_default_mem_pool(stream.context().cu_device()).w()?;
        result::mem_pool::get_attribute(pool, attribute, (&raw mut bytes).cast()).w()?;
    }
    Ok(bytes)
}

/// `CUDA 13.0, cuBLAS 13.1.0`, and cuDNN's version if something has used it.
fn libraries() -> Result<String> {
    let mut cuda = 0;
    // SAFETY: the driver writes one number.
    unsafe { sys::cuDriverGetVersion(&raw mut cuda) }
        .result()
        .w()?;
    let [mut major, mut minor, mut patch] = [0; 3];
    for (property, value) in [
        (libraryPropertyType::MAJOR_VERSION, &mut major),
        (libraryPropertyType::MINOR_VERSION, &mut minor),
        (libraryPropertyType::PATCH_LEVEL, &mut patch),
    ] {
        // SAFETY: cuBLAS writes one number.
        unsafe { cublasGetProperty(property, value) }.result().w()?;
    }
    let (cuda_major, cuda_minor) = (cuda / 1000, cuda % 1000 / 10);
    let libraries = format!("CUDA {cuda_major}.{cuda_minor}, cuBLAS {major}.{minor}.{patch}");
    #[cfg(feature = "cudnn")]
    if let Some(version) = crate::cuda::cudnn_library::version() {
        let (major, minor, patch) = (version / 10000, version / 100 % 100, version % 100);
        return Ok(format!("{libraries}, cuDNN {major}.{minor}.{patch}"));
    }
    Ok(libraries)
}
