//! Copies from the host that it does not wait for. From ordinary memory a GPU cannot copy on its own: the driver may wait for
//! all earlier work before it does. So values go through memory that the GPU can read, kept for the next copies.

#![allow(unsafe_code)]

use crate::cuda::values::Fresh;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::CU_MEMHOSTALLOC_WRITECOMBINED;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaEvent, result};
use candle_core::{CudaDevice, Result, Tensor};
use std::sync::{Arc, Mutex, PoisonError};

/// Memory of the host that a GPU reads, for the life of the program.
struct Staging {
    ids: &'static mut [u32],
    gpu: usize,
    /// After the last copy from it.
    copied: CudaEvent,
}

/// As many as are being copied from at a time: a step's, which ends when the host reads the loss.
static STAGING: Mutex<Vec<Staging>> = Mutex::new(Vec::new());

impl Staging {
    fn new(context: &Arc<CudaContext>, len: usize) -> Result<Self> {
        context.bind_to_thread().w()?;
        let len = len.next_power_of_two();
        // SAFETY: the memory is aligned to pages, and zeroed before it is a slice; it is never freed.
        let ids = unsafe {
            let start = result::malloc_host(len * size_of::<u32>(), CU_MEMHOSTALLOC_WRITECOMBINED);
            let start = start.w()?.cast::<u32>();
            start.write_bytes(0, len);
            std::slice::from_raw_parts_mut(start, len)
        };
        Ok(Self {
            ids,
            gpu: context.ordinal(),
            copied: context.new_event(None).w()?,
        })
    }

    fn is_free_for(&self, gpu: usize, len: usize) -> bool {
        self.gpu == gpu && self.ids.len() >= len && self.copied.is_complete()
    }
}

/// The ids on the GPU.
pub(crate) fn upload(ids: &[u32], device: &CudaDevice) -> Result<Tensor> {
    let (stream, on_gpu) = (device.cuda_stream(), Fresh::<u32>::new(device, ids.len())?);
    if ids.is_empty() {
        return Ok(on_gpu.into_tensor(0));
    }
    let context = stream.context();
    let mut all = STAGING.lock().unwrap_or_else(PoisonError::into_inner);
    let free = all
        .iter()
        .position(|staging| staging.is_free_for(context.ordinal(), ids.len()));
    let index = match free {
        Some(index) => index,
        None => {
            all.push(Staging::new(context, ids.len())?);
            all.len() - 1
        }
    };
    let staging = &mut all[index];
    let staged = &mut staging.ids[..ids.len()];
    staged.copy_from_slice(ids);
    // SAFETY: the GPU has that much memory there; nobody writes the staged ids before the event says they are copied.
    unsafe { result::memcpy_htod_async(on_gpu.out().address(), staged, stream.cu_stream()) }.w()?;
    if let Err(error) = staging.copied.record(&stream) {
        // Nobody would know when it may be written to again.
        all.swap_remove(index);
        return Err(error).w();
    }
    Ok(on_gpu.into_tensor(ids.len()))
}
