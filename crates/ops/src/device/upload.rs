//! Ids on their way to the device that reads them.

use candle_core::{Device, Result, Shape, Tensor};
#[cfg(feature = "cuda")]
use std::sync::{Mutex, PoisonError};

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

/// Tensors that were uploaded, by what they are made from.
#[cfg(feature = "cuda")]
pub(crate) type Uploads<K> = Mutex<Vec<(K, Tensor)>>;

/// The tensor of `ids()` on `device`: uploaded when it is first asked for, and kept in `uploads` under `what`.
#[cfg(feature = "cuda")]
pub(crate) fn upload_once<K: PartialEq>(
    uploads: &Uploads<K>,
    what: K,
    device: &Device,
    ids: impl FnOnce() -> Vec<u32>,
) -> Result<Tensor> {
    let mut uploads = uploads.lock().unwrap_or_else(PoisonError::into_inner);
    let known = uploads
        .iter()
        .find(|(known, ids)| *known == what && ids.device().same_device(device));
    if let Some((_, ids)) = known {
        return Ok(ids.clone());
    }
    let ids = ids();
    let len = ids.len();
    let ids = upload(ids, len, device)?;
    uploads.push((what, ids.clone()));
    Ok(ids)
}
