//! Opening a GPU the way training needs it.

#![allow(unsafe_code)]

use super::library::missing_library;
use super::loaded::{load_all, load_those_of_candle};
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::cublas::sys::{cublasMath_t, cublasSetMathMode};
use candle_core::cuda_backend::cudarc::driver::{CudaContext, result, sys};
use candle_core::{CudaDevice, Device, Result, bail};

/// Opens GPU `ordinal`: one stream shared by all threads, freed memory kept, no events per tensor,
/// products of bf16 and f16 summed in f32, kernels loaded.
///
/// # Errors
/// When a library could not be loaded, there is no such GPU, or it fails to start.
pub(crate) fn open(ordinal: usize) -> Result<Device> {
    let num_devices = match CudaContext::device_count() {
        Ok(count) => usize::try_from(count).unwrap_or_default(),
        Err(err) => return Err(unavailable(ordinal, &err.to_string())),
    };
    if ordinal >= num_devices {
        bail!("cuda:{ordinal} is not there: CUDA shows {num_devices} GPUs, numbered from 0")
    }
    // candle's plain constructor uses one stream per host thread, without order between them.
    let device = Device::new_cuda_with_stream(ordinal)
        .map_err(|err| unavailable(ordinal, &err.to_string()))?;
    let cuda = device.as_cuda_device()?;
    keep_freed_memory(cuda)?;
    sum_in_f32(cuda)?;
    load_all(cuda.cuda_stream().context())?;
    load_those_of_candle(cuda)?;
    // SAFETY: tensors of this device are used on its one stream, which orders them. The default costs two events for each
    // allocation; work on a second stream must record and wait for events of its own.
    unsafe { cuda.disable_event_tracking() };
    Ok(device)
}

/// Number of GPUs that CUDA shows; 0 if it cannot be asked.
pub(crate) fn num_gpus() -> usize {
    let count = CudaContext::device_count();
    count.map_or(0, |count| usize::try_from(count).unwrap_or_default())
}

fn unavailable(ordinal: usize, reason: &str) -> candle_core::Error {
    let sentence = missing_library().unwrap_or_else(|| reason.to_string());
    candle_core::Error::Msg(format!("cuda:{ordinal} cannot be used: {sentence}"))
}

/// Tells the driver's memory pool to give nothing back: by default it does at each synchronisation, and the next step
/// maps the same memory again.
fn keep_freed_memory(device: &CudaDevice) -> Result<()> {
    let stream = device.cuda_stream();
    let context = stream.context();
    if !context.has_async_alloc() {
        return Ok(());
    }
    let mut threshold = u64::MAX;
    // SAFETY: the device is open, so its handle is valid and its default pool lives as long as it; the attribute is a
    // 64-bit count of bytes, read during the call.
    unsafe {
        let pool = result::device::get_default_mem_pool(context.cu_device()).w()?;
        result::mem_pool::set_attribute(
            pool,
            sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
            (&raw mut threshold).cast(),
        )
        .w()
    }
}

/// Ranks that are threads share candle's handle of cuBLAS, which NVIDIA allows while no thread changes its settings: they are
/// made here and nowhere else, and candle's products change none either. Its workspace is shared by products on one stream,
/// one after the other.
///
/// Makes cuBLAS add the parts of a product in f32: by default it may round them to the result's type first where it divides a long sum.
fn sum_in_f32(device: &CudaDevice) -> Result<()> {
    let blas = device.cublas_handle();
    let mode = cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
    // SAFETY: the handle is the device's and lives as long as it; no other thread has the device yet.
    unsafe { cublasSetMathMode(*blas.handle(), mode) }
        .result()
        .w()
}
