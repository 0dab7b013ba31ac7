//! A GPU at work for one operation: grids, memory, and tensors checked to be what a kernel takes.

#![allow(unsafe_code)]

use super::launch::Launch;
use super::pointer::{In, Out};
use super::values::{Fresh, GpuValues, address};
use candle_core::backend::BackendDevice;
use candle_core::cuda_backend::cudarc::driver::result::memcpy_dtod_async;
use candle_core::cuda_backend::cudarc::driver::{DeviceRepr, LaunchConfig};
use candle_core::cuda_backend::{CudaDType, WrapErr};
use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, Device, InplaceOp1, Layout, Result, Tensor, WithDType,
    bail,
};
use std::cell::Cell;
use std::mem::size_of;

/// Threads of a block, but for kernels that say otherwise.
pub(crate) const BLOCK: u32 = 256;

/// The largest grid; kernels loop over what is beyond it.
const MAX_BLOCKS: usize = i32::MAX as usize;

/// The same of a grid's second and third dim.
pub(crate) const MAX_BLOCKS_Y: usize = 65535;

/// A GPU, and the operation that uses it, for its errors.
pub(crate) struct Gpu {
    pub(crate) device: CudaDevice,
    op: &'static str,
}

impl Gpu {
    /// The GPU that holds `tensor`, made this thread's.
    pub(crate) fn of(op: &'static str, tensor: &Tensor) -> Result<Self> {
        match tensor.device() {
            Device::Cuda(device) => {
                device.cuda_stream().context().bind_to_thread().w()?;
                Ok(Self {
                    device: device.clone(),
                    op,
                })
            }
            other => bail!(
                "{op}: expected a tensor on CUDA, got one on {:?}",
                other.location()
            ),
        }
    }

    /// The operation.
    pub(crate) fn op(&self) -> &'static str {
        self.op
    }

    /// Puts a copy of `len` values on the GPU's stream.
    ///
    /// # Safety
    /// Both must hold `len` values, not the same ones.
    pub(crate) unsafe fn copy<T: DeviceRepr>(
        &self,
        dst: Out<T>,
        src: In<T>,
        len: usize,
    ) -> Result<()> {
        let (stream, bytes) = (self.device.cuda_stream(), len * size_of::<T>());
        // SAFETY: the caller's promise; both are on this stream's GPU.
        unsafe { memcpy_dtod_async(dst.address(), src.address(), bytes, stream.cu_stream()) }.w()
    }

    /// A grid of `blocks` blocks in a row.
    pub(crate) fn blocks(&self, blocks: usize, block: u32, shared_bytes: usize) -> Result<Launch> {
        self.grid([blocks, 1, 1], block, shared_bytes)
    }

    /// A grid in three dimensions, of blocks of `block` threads with `shared_bytes` of shared memory each.
    pub(crate) fn grid(&self, grid: [usize; 3], block: u32, shared_bytes: usize) -> Result<Launch> {
        let [x, y, z] = grid;
        if y > MAX_BLOCKS_Y || z > MAX_BLOCKS_Y {
            bail!(
                "{}: a grid of {x} x {y} x {z} blocks is too large: the last two end at {MAX_BLOCKS_Y}",
                self.op
            )
        }
        Ok(Launch {
            stream: self.device.cuda_stream(),
            config: LaunchConfig {
                grid_dim: (self.u32(x)?, y as u32, z as u32),
                block_dim: (block, 1, 1),
                shared_mem_bytes: self.u32(shared_bytes)?,
            },
        })
    }

    /// A launch over `len` values, 8 for each thread.
    pub(crate) fn elements(&self, len: usize) -> Result<Launch> {
        self.blocks(len.div_ceil(2048).min(MAX_BLOCKS), BLOCK, 0)
    }

    /// A launch over `rows`, a block for each.
    pub(crate) fn rows(&self, rows: usize, block: u32, shared_bytes: usize) -> Result<Launch> {
        self.blocks(rows.min(MAX_BLOCKS), block, shared_bytes)
    }

    /// Memory for `len` values, not yet written.
    pub(crate) fn alloc<T: CudaDType + DeviceRepr>(&self, len: usize) -> Result<Fresh<T>> {
        Fresh::new(&self.device, len)
    }

    /// A size as kernels take it.
    pub(crate) fn i32(&self, size: usize) -> Result<i32> {
        i32::try_from(size).or_else(|_| bail!("{}: {size} is more than kernels count to", self.op))
    }

    /// A size as kernels take it.
    pub(crate) fn u32(&self, size: usize) -> Result<u32> {
        u32::try_from(size).or_else(|_| bail!("{}: {size} is more than kernels count to", self.op))
    }

    /// The values of `tensor`, which must be contiguous and on this GPU.
    pub(crate) fn read<'a, T: CudaDType + WithDType>(
        &self,
        what: &str,
        tensor: &'a Tensor,
    ) -> Result<GpuValues<'a>> {
        self.check::<T>(what, tensor)?;
        GpuValues::new::<T>(tensor)
    }

    /// Lets `write` change the values of `dst`, which must be contiguous.
    pub(crate) fn write<T: CudaDType + WithDType + DeviceRepr>(
        &self,
        what: &str,
        dst: &Tensor,
        write: impl FnOnce(Out<T>) -> Result<()>,
    ) -> Result<()> {
        self.check::<T>(what, dst)?;
        if dst.elem_count() == 0 {
            return Ok(());
        }
        let write = Cell::new(Some(write));
        dst.inplace_op1(&Write::<T, _> {
            op: self.op,
            write,
            of: std::marker::PhantomData,
        })
    }

    fn check<T: WithDType>(&self, what: &str, tensor: &Tensor) -> Result<()> {
        let op = self.op;
        let is_contiguous = tensor.is_contiguous() || tensor.elem_count() == 0;
        if !tensor.device().is_cuda() || tensor.dtype() != T::DTYPE || !is_contiguous {
            bail!(
                "{op}: {what} must be contiguous {:?} on CUDA, got dtype {:?} on device {:?} with strides {:?}\nhint: convert it with to_dtype or move it with to_device",
                T::DTYPE,
                tensor.dtype(),
                tensor.device().location(),
                tensor.stride()
            )
        }
        match tensor.device() {
            Device::Cuda(device) if device.same_device(&self.device) => Ok(()),
            _ => bail!("{op}: {what} is on another device than the rest"),
        }
    }
}

/// Calls a function with the values of a tensor under candle's write lock, once.
struct Write<T, F> {
    op: &'static str,
    write: Cell<Option<F>>,
    of: std::marker::PhantomData<T>,
}

impl<T: CudaDType, F: FnOnce(Out<T>) -> Result<()>> InplaceOp1 for Write<T, F> {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        bail!("{}: expected values on CUDA, got them on the CPU", self.op)
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        match self.write.take() {
            Some(write) => write(Out::new(address::<T>(storage, layout)?)),
            None => bail!("{}: written twice", self.op),
        }
    }
}
