//! Copies to and from memory of the host that run on streams of their own.
//!
//! ```text
//! compute   allocates, ready               wait, computes, ready             wait, frees
//!                           \             /                     \           /
//! up                         wait, copy, done                    \         /
//! down                                                            wait, copy, done
//! ```
//! A copy also waits for the last one from or to its buffer of the host.

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, PinnedHostSlice};
use candle_core::{CudaDevice, CudaStorage, Result, Shape, Storage, Tensor, bail};
use std::sync::Arc;

use crate::OpOutput;

/// A stream for each direction, beside the one that computes.
pub(crate) struct CopyStreams {
    device: CudaDevice,
    up: Arc<CudaStream>,
    down: Arc<CudaStream>,
}

/// Memory of the host that a GPU copies to and from.
pub(crate) struct PinnedBuffer {
    values: PinnedHostSlice<f32>,
    len: usize,
    /// The last copy; none before the first.
    last: Option<Arc<CudaEvent>>,
}

/// Values on the GPU that are being copied to or from.
pub(crate) struct StreamCopy {
    /// Until the end.
    values: Option<Tensor>,
    done: Arc<CudaEvent>,
    compute: Arc<CudaStream>,
}

impl CopyStreams {
    pub(crate) fn new(device: &CudaDevice) -> Result<Self> {
        let context = device.cuda_stream().context().clone();
        context.bind_to_thread().w()?;
        Ok(Self {
            device: device.clone(),
            up: context.new_stream().w()?,
            down: context.new_stream().w()?,
        })
    }

    pub(crate) fn buffer(&self, len: usize) -> Result<PinnedBuffer> {
        let context = self.up.context();
        // SAFETY: nothing reads the memory before values were copied there: see `start_fetch`. An allocation of nothing is an
        // error to CUDA.
        let values = unsafe { context.alloc_pinned_with_flags::<f32>(len.max(1), 0) };
        let values = values.w().map_err(|err| {
            let bytes = len * size_of::<f32>();
            err.context(format!(
                "asking for {bytes} bytes of the host's memory that the GPU can copy to"
            ))
        })?;
        Ok(PinnedBuffer {
            values,
            len,
            last: None,
        })
    }

    pub(crate) fn start_store(
        &self,
        values: Tensor,
        buffer: &mut PinnedBuffer,
    ) -> Result<StreamCopy> {
        self.let_wait(&self.down, buffer)?;
        if buffer.len > 0 {
            let (storage, layout) = values.storage_and_layout();
            let Storage::Cuda(storage) = &*storage else {
                bail!("{values:?} is not on a GPU");
            };
            let slice = storage.as_cuda_slice::<f32>()?;
            let start = layout.start_offset();
            let part = slice.slice(start..start + buffer.len);
            self.down.memcpy_dtoh(&part, &mut buffer.values).w()?;
        }
        self.copy(values, &self.down, buffer)
    }

    pub(crate) fn start_fetch(&self, buffer: &mut PinnedBuffer) -> Result<StreamCopy> {
        if buffer.last.is_none() {
            bail!("nothing was stored in the buffer");
        }
        // SAFETY: all values that the tensor has are copied there before anything reads them.
        let slice = unsafe { self.device.alloc::<f32>(buffer.len.max(1)) };
        let mut slice = slice.map_err(|err| {
            let bytes = buffer.len * size_of::<f32>();
            err.context(format!("asking for {bytes} bytes of the GPU's memory"))
        })?;
        self.let_wait(&self.up, buffer)?;
        if buffer.len > 0 {
            self.up.memcpy_htod(&buffer.values, &mut slice).w()?;
        }
        let storage = CudaStorage::wrap_cuda_slice(slice, self.device.clone());
        let values = OpOutput::on_cuda(storage, Shape::from(buffer.len)).into_tensor();
        self.copy(values, &self.up, buffer)
    }

    /// What is put on `stream` from now on comes after all that computes, and after the last copy of the buffer. cudarc does not see to
    /// that: candle's devices here do not track events.
    fn let_wait(&self, stream: &CudaStream, buffer: &PinnedBuffer) -> Result<()> {
        let ready = self.device.cuda_stream().record_event(None).w()?;
        stream.wait(&ready).w()?;
        match &buffer.last {
            Some(last) => stream.wait(last).w(),
            None => Ok(()),
        }
    }

    /// What was just put on `stream`.
    fn copy(
        &self,
        values: Tensor,
        stream: &CudaStream,
        buffer: &mut PinnedBuffer,
    ) -> Result<StreamCopy> {
        let done = Arc::new(stream.record_event(None).w()?);
        buffer.last = Some(done.clone());
        Ok(StreamCopy {
            values: Some(values),
            done,
            compute: self.device.cuda_stream(),
        })
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // The memory is freed when nothing copies from or to it. A GPU that has failed copies no more.
        if let Some(last) = &self.last {
            let _ = last.synchronize();
        }
    }
}

impl StreamCopy {
    pub(crate) fn wait(mut self) -> Result<Tensor> {
        self.compute.wait(&self.done).w()?;
        match self.values.take() {
            Some(values) => Ok(values),
            None => bail!("a copy was waited for twice"),
        }
    }
}

impl Drop for StreamCopy {
    fn drop(&mut self) {
        // The stream that computes frees the values. If it cannot be made to wait, they may still be in use.
        if let Some(values) = self.values.take()
            && self.compute.wait(&self.done).is_err()
        {
            std::mem::forget(values);
        }
    }
}
