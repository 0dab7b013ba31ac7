//! Devices: their names, which one a thread calls, and tensors without elements on them.

#[cfg(feature = "cuda")]
use candle_core::{CudaDevice, cuda_backend::WrapErr};
use candle_core::{DType, Device, DeviceLocation, Result, Shape, Tensor};

/// The address that means a stream for each thread of the host.
#[cfg(feature = "cuda")]
const STREAM_PER_THREAD: usize = 2;

/// A device's name: `cpu`, `cuda:N`.
pub(crate) fn name(device: &Device) -> String {
    match device.location() {
        DeviceLocation::Cpu => "cpu".to_string(),
        DeviceLocation::Cuda { gpu_id } => format!("cuda:{gpu_id}"),
        DeviceLocation::Metal { gpu_id } => format!("metal:{gpu_id}"),
    }
}

/// Makes this thread's calls to CUDA go to `device`.
pub(crate) fn make_current(device: &Device) -> Result<()> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => cuda.cuda_stream().context().bind_to_thread().w(),
        _ => Ok(()),
    }
}

/// Whether all work on `device` goes through one stream, whichever thread it comes from.
#[cfg(feature = "cuda")]
pub(crate) fn has_a_stream(device: &CudaDevice) -> bool {
    device.cuda_stream().cu_stream() as usize != STREAM_PER_THREAD
}

/// A tensor without elements, of a shape that has none: on a GPU a view of something, for an allocation of nothing is an
/// error to CUDA.
pub(crate) fn empty(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    Tensor::zeros(1, dtype, device)?
        .narrow(0, 0, 0)?
        .reshape(shape.into())
}

/// Memory for a result on a GPU: whoever asks for it has a kernel or a copy write all of it, before it is given out.
#[cfg(feature = "cuda")]
#[allow(unsafe_code)]
pub(crate) fn unwritten(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    // SAFETY: all bits are numbers, and as said above nobody reads them.
    unsafe { Tensor::empty(shape, dtype, device) }
}
