//! Ids on their way to the device that reads them.

use candle_core::{Device, Result, Shape, Tensor};

/// The ids as a tensor of this shape on `device`. The host does not wait for a GPU: as for all work, its stream gets to it.
///
/// # Errors
/// When the shape does not fit, or the GPU or the memory that it copies from cannot be had.
pub fn upload(ids: Vec<u32>, shape: impl Into<Shape>, device: &Device) -> Result<Tensor> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => super::upload_gpu::upload(&ids, cuda)?.reshape(shape.into()),
        _ => Tensor::from_vec(ids, shape, device),
    }
}
