//! Asking the driver about a GPU.

use crate::GpuState;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{result, sys};
use candle_core::{CudaDevice, Result};
use sys::CUmemPool_attribute::{CU_MEMPOOL_ATTR_USED_MEM_CURRENT, CU_MEMPOOL_ATTR_USED_MEM_HIGH};

/// Name and memory of a GPU. Memory is that of the driver's pool, from which all tensors come.
pub(crate) fn state(device: &CudaDevice) -> Result<GpuState> {
    let stream = device.cuda_stream();
    let context = stream.context();
    let (free, total) = context.mem_get_info().w()?;
    let of_pool = |attribute| {
        let mut bytes = 0u64;
        // SAFETY: the device is open, so its handle is valid and its default pool lives as long as it; both attributes are
        // 64-bit counts of bytes, written during the call.
        unsafe {
            let pool = result::device::get_default_mem_pool(context.cu_device()).w()?;
            result::mem_pool::get_attribute(pool, attribute, (&raw mut bytes).cast()).w()?;
        }
        Ok::<_, candle_core::Error>(bytes)
    };
    Ok(GpuState {
        name: context.name().w()?,
        used: of_pool(CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
        peak: of_pool(CU_MEMPOOL_ATTR_USED_MEM_HIGH)?,
        free: free as u64,
        total: total as u64,
    })
}
