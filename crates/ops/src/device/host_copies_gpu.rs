//! Copies to and from memory of the host that run on streams of their own.
//!
//! ```text
//! compute   allocates, ready               wait, computes, ready             wait, frees
//!                           \             /                     \           /
//! up                         wait, copy, done                    \         /
//! down                                                            wait, copy, done
//! ```
//! A copy also waits for the last one from or to its buffer of the host.

#![allow(unsafe_code)]

use candle_core::cuda_backend::cudarc::driver::{
    CudaEvent, CudaStream, DeviceRepr, PinnedHostSlice, ValidAsZeroBits,
};
use candle_core::cuda_backend::{CudaDType, WrapErr};
use candle_core::{CudaDevice, CudaStorage, DType, Result, Storage, Tensor, bail};
use half::{bf16, f16};
use std::ops::Range;
use std::sync::Arc;

use crate::cuda::values::Fresh;

/// A stream for each direction, beside the one that computes.
pub(crate) struct CopyStreams {
    device: CudaDevice,
    up: Arc<CudaStream>,
    down: Arc<CudaStream>,
}

/// Memory of the host that a GPU copies to and from.
pub(crate) struct PinnedBuffer {
    values: Pinned,
    len: usize,
    /// The last copy; none before the first.
    last: Option<Arc<CudaEvent>>,
}

enum Pinned {
    F32(PinnedHostSlice<f32>),
    Bf16(PinnedHostSlice<bf16>),
    F16(PinnedHostSlice<f16>),
    I16(PinnedHostSlice<i16>),
    U8(PinnedHostSlice<u8>),
}

/// Does the same with the values of each type.
macro_rules! by_type {
    ($pinned:expr, $host:ident => $do:expr) => {
        match $pinned {
            Pinned::F32($host) => $do,
            Pinned::Bf16($host) => $do,
            Pinned::F16($host) => $do,
            Pinned::I16($host) => $do,
            Pinned::U8($host) => $do,
        }
    };
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

    pub(crate) fn buffer(&self, len: usize, dtype: DType) -> Result<PinnedBuffer> {
        let values = match dtype {
            DType::F32 => Pinned::F32(self.pinned(len)?),
            DType::BF16 => Pinned::Bf16(self.pinned(len)?),
            DType::F16 => Pinned::F16(self.pinned(len)?),
            DType::I16 => Pinned::I16(self.pinned(len)?),
            DType::U8 => Pinned::U8(self.pinned(len)?),
            dtype => bail!("values of type {dtype:?} cannot be kept on the host"),
        };
        Ok(PinnedBuffer {
            values,
            len,
            last: None,
        })
    }

    fn pinned<T: DeviceRepr>(&self, len: usize) -> Result<PinnedHostSlice<T>> {
        let context = self.up.context();
        // SAFETY: nothing reads the memory before values were copied there: see `start_fetch`. An allocation of nothing is an
        // error to CUDA.
        let values = unsafe { context.alloc_pinned_with_flags::<T>(len.max(1), 0) };
        values.w().map_err(|err| {
            let bytes = len * size_of::<T>();
            err.context(format!(
                "asking for {bytes} bytes of the host's memory that the GPU can copy to"
            ))
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
            let start = layout.start_offset();
            let part = start..start + buffer.len;
            by_type!(&mut buffer.values, host => self.store(storage, part, host)?);
        }
        self.copy(values, &self.down, buffer)
    }

    /// `part` is one of the buffer's.
    pub(crate) fn start_fetch(
        &self,
        buffer: &mut PinnedBuffer,
        part: Range<usize>,
    ) -> Result<StreamCopy> {
        if buffer.last.is_none() {
            bail!("nothing was stored in the buffer");
        }
        let values = by_type!(&buffer.values, host => self.fetch(host, part, buffer)?);
        self.copy(values, &self.up, buffer)
    }

    /// Starts to copy a part of the values of the GPU.
    fn store<T: CudaDType + DeviceRepr>(
        &self,
        storage: &CudaStorage,
        part: Range<usize>,
        host: &mut PinnedHostSlice<T>,
    ) -> Result<()> {
        let values = storage.as_cuda_slice::<T>()?.slice(part);
        self.down.memcpy_dtoh(&values, host).w()
    }

    /// Starts to copy a part of the values of `buffer`, which are those of `host`, to new memory of the GPU.
    fn fetch<T: CudaDType + DeviceRepr + ValidAsZeroBits>(
        &self,
        host: &PinnedHostSlice<T>,
        part: Range<usize>,
        buffer: &PinnedBuffer,
    ) -> Result<Tensor> {
        let len = part.len();
        // All values that the tensor has are copied there before anything reads them.
        let mut on_gpu = Fresh::<T>::new(&self.device, len)?;
        self.let_wait(&self.up, buffer)?;
        if len == buffer.len && len > 0 {
            self.up.memcpy_htod(host, on_gpu.slice_mut()).w()?;
        } else if len > 0 {
            // The host waits for the last copy of the whole, if that is not over: the store of an update, before the first part is used.
            self.up
                .memcpy_htod(&host.as_slice().w()?[part], on_gpu.slice_mut())
                .w()?;
        }
        Ok(on_gpu.into_tensor(len))
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
