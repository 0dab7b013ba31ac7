//! Copies of tensors for other ranks.

use candle_core::{Device, Result, Tensor};
#[cfg(feature = "cuda")]
pub(super) use gpu::CopyOf;

/// A copy of `xs` on `device`, with a storage of its own, of the size of `xs` even if `xs` is a view of something larger.
pub(super) fn copy(xs: &Tensor, device: &Device) -> Result<Tensor> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => gpu::copy(xs, device),
        _ => xs.force_contiguous(),
    }
}

/// Copies within GPUs and between them.
#[cfg(feature = "cuda")]
#[allow(unsafe_code)]
mod gpu {
    use candle_core::cuda_backend::{CudaDType, WrapErr};
    use candle_core::{
        CpuStorage, CudaStorage, Device, InplaceOp1, Layout, Result, Storage, Tensor, bail,
    };

    use crate::memory::device::{empty, unwritten};
    use crate::reduction::element::with_element;

    /// A copy of `xs` on `device`, with a storage of its own.
    pub(super) fn copy(xs: &Tensor, device: &Device) -> Result<Tensor> {
        if xs.elem_count() == 0 {
            return empty(xs.shape(), xs.dtype(), device);
        }
        let copy = unwritten(xs.elem_count(), xs.dtype(), device)?;
        copy.inplace_op1(&CopyOf(xs))?;
        copy.reshape(xs.shape())
    }

    /// Fills a tensor on a GPU with the values of another one, on this or another GPU, of the same dtype and size.
    pub(in crate::local) struct CopyOf<'a>(pub &'a Tensor);

    impl InplaceOp1 for CopyOf<'_> {
        fn name(&self) -> &'static str {
            "copy"
        }

        fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
            bail!("copy: a rank's device is the CPU while the others' are GPUs")
        }

        fn cuda_fwd(&self, dst: &mut CudaStorage, dst_layout: &Layout) -> Result<()> {
            let (src, src_layout) = self.0.storage_and_layout();
            let Storage::Cuda(src) = &*src else {
                bail!("copy: an input is not on a GPU as the other ranks' are")
            };
            let places = (dst_layout.start_offset(), src_layout.start_offset());
            let len = src_layout.shape().elem_count();
            with_element!(self.0.dtype(), copy_between(dst, src, places, len))
        }
    }

    /// Enqueues a copy on the stream of `dst`. Between two streams that of `dst` first waits for what has been enqueued on that
    /// of `src`, which in turn does not overwrite or free the values before they have been copied.
    fn copy_between<T: CudaDType>(
        dst: &mut CudaStorage,
        src: &CudaStorage,
        (dst_start, src_start): (usize, usize),
        len: usize,
    ) -> Result<()> {
        let (here, there) = (dst.device.cuda_stream(), src.device.cuda_stream());
        let from = src.as_cuda_slice::<T>()?;
        let to = dst.as_cuda_slice_mut::<T>()?;
        let (Some(from), Some(mut to)) = (
            from.try_slice(src_start..src_start + len),
            to.try_slice_mut(dst_start..dst_start + len),
        ) else {
            bail!("copy: a tensor is shorter than its shape")
        };
        if here == there {
            return here.memcpy_dtod(&from, &mut to).w();
        }
        here.join(&there).w()?;
        let copied = here.memcpy_dtod(&from, &mut to).w();
        there.join(&here).w()?;
        copied
    }
}
