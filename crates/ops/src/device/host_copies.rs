//! Values of a device that are kept on the host, and copies that run beside what the device computes.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, bail};

/// Copies between a device and the host's memory. On the CPU nothing is copied.
pub struct HostCopies(Streams);

enum Streams {
    None,
    #[cfg(feature = "cuda")]
    Gpu(super::host_copies_gpu::CopyStreams),
}

/// Memory of the host for flat values of a device.
pub struct HostBuffer {
    len: usize,
    dtype: DType,
    kept: Kept,
}

enum Kept {
    Here(Option<Tensor>),
    #[cfg(feature = "cuda")]
    Pinned(super::host_copies_gpu::PinnedBuffer),
}

/// Values on the device that are being copied to or from. When it is dropped the device frees them after the copy.
pub struct HostCopy(Copying);

enum Copying {
    Done(Tensor),
    #[cfg(feature = "cuda")]
    Gpu(super::host_copies_gpu::StreamCopy),
}

impl HostCopies {
    /// Copies to and from `device`.
    ///
    /// # Errors
    /// A GPU that has failed.
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self(match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => Streams::Gpu(super::host_copies_gpu::CopyStreams::new(cuda)?),
            _ => Streams::None,
        }))
    }

    /// Memory for `len` values of type F32, BF16, F16, I16 or U8.
    ///
    /// # Errors
    /// Another type; the host has no such memory that a GPU can copy to.
    pub fn buffer(&self, len: usize, dtype: DType) -> Result<HostBuffer> {
        if !matches!(
            dtype,
            DType::F32 | DType::BF16 | DType::F16 | DType::I16 | DType::U8
        ) {
            bail!(
                "values of type {dtype:?} cannot be kept on the host, only F32, BF16, F16, I16 and U8"
            );
        }
        let kept = match &self.0 {
            Streams::None => Kept::Here(None),
            #[cfg(feature = "cuda")]
            Streams::Gpu(streams) => Kept::Pinned(streams.buffer(len, dtype)?),
        };
        Ok(HostBuffer { len, dtype, kept })
    }

    /// Starts to copy `values` to the host. They must not be written to any more.
    ///
    /// # Errors
    /// Values that are not as many contiguous ones of the device, and of that type, as the buffer is for, and a GPU that has failed.
    pub fn start_store(&self, values: Tensor, buffer: &mut HostBuffer) -> Result<HostCopy> {
        let fits = values.dims() == [buffer.len] && values.dtype() == buffer.dtype;
        if !fits || !values.is_contiguous() {
            bail!(
                "{values:?} cannot be kept in a buffer of {} {:?} values",
                buffer.len,
                buffer.dtype
            );
        }
        Ok(HostCopy(match (&self.0, &mut buffer.kept) {
            (Streams::None, Kept::Here(kept)) => {
                *kept = Some(values.clone());
                Copying::Done(values)
            }
            #[cfg(feature = "cuda")]
            (Streams::Gpu(streams), Kept::Pinned(pinned)) => {
                Copying::Gpu(streams.start_store(values, pinned)?)
            }
            #[cfg(feature = "cuda")]
            _ => bail!("the buffer belongs to another device"),
        }))
    }

    /// Starts to copy what was stored last to new memory of the device.
    ///
    /// # Errors
    /// A buffer that nothing was stored in, and a GPU that has no memory left or has failed.
    pub fn start_fetch(&self, buffer: &mut HostBuffer) -> Result<HostCopy> {
        let all = 0..buffer.len;
        self.start_fetch_part(buffer, all)
    }

    /// [`Self::start_fetch`] of the values at `part`.
    ///
    /// # Errors
    /// As there, and a part that the buffer has not.
    pub fn start_fetch_part(
        &self,
        buffer: &mut HostBuffer,
        part: Range<usize>,
    ) -> Result<HostCopy> {
        if part.start > part.end || part.end > buffer.len {
            let len = buffer.len;
            bail!("a buffer of {len} values has none at {part:?}");
        }
        Ok(HostCopy(match (&self.0, &mut buffer.kept) {
            (_, Kept::Here(None)) => bail!("nothing was stored in the buffer"),
            (Streams::None, Kept::Here(Some(kept))) => {
                Copying::Done(kept.narrow(0, part.start, part.len())?)
            }
            #[cfg(feature = "cuda")]
            (Streams::Gpu(streams), Kept::Pinned(pinned)) => {
                Copying::Gpu(streams.start_fetch(pinned, part)?)
            }
            #[cfg(feature = "cuda")]
            _ => bail!("the buffer belongs to another device"),
        }))
    }
}

impl HostCopy {
    /// The values; what the device computes from now on comes after the copy. The host does not wait.
    ///
    /// # Errors
    /// A GPU that has failed.
    pub fn wait(self) -> Result<Tensor> {
        match self.0 {
            Copying::Done(values) => Ok(values),
            #[cfg(feature = "cuda")]
            Copying::Gpu(copy) => copy.wait(),
        }
    }
}
