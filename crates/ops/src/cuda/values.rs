//! Tensors on the GPU as kernels see them: contiguous values of a known type, and new ones.

use super::launch::Launch;
use super::pointer::{In, Out};
use crate::OpOutput;
use candle_core::backend::BackendDevice;
use candle_core::cuda_backend::cudarc::driver::result::memcpy_dtod_async;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DeviceRepr};
use candle_core::cuda_backend::{CudaDType, WrapErr};
use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, Device, InplaceOp1, Layout, Result, Shape, Storage,
    StorageRef, Tensor, WithDType, bail,
};
use half::bf16;
use std::cell::Cell;
use std::mem::size_of;

/// Threads of a block, but for kernels that say otherwise.
pub(super) const BLOCK: u32 = 256;

/// Blocks of a grid that loops over its work: 16 for each of 132 multiprocessors.
const MAX_BLOCKS: usize = 2112;

/// A type that kernels have an instance for.
pub(super) trait Element: CudaDType + DeviceRepr + WithDType {
    /// End of the instance's name.
    const SUFFIX: &'static str;
}

impl Element for f32 {
    const SUFFIX: &'static str = "_f32";
}

impl Element for bf16 {
    const SUFFIX: &'static str = "_bf16";
}

/// Evaluates an expression with `$t` being the type of `$tensor`'s values, f32 or bf16.
macro_rules! by_dtype {
    ($op:expr, $what:expr, $tensor:expr, $t:ident => $expression:expr) => {
        match $tensor.dtype() {
            candle_core::DType::F32 => {
                type $t = f32;
                $expression
            }
            candle_core::DType::BF16 => {
                type $t = half::bf16;
                $expression
            }
            dtype => candle_core::bail!(
                "{}: {} must be an F32 or BF16 tensor, got dtype {dtype:?} on device {:?}\nhint: convert it with to_dtype",
                $op,
                $what,
                $tensor.device().location()
            ),
        }
    };
}
pub(super) use by_dtype;

/// A GPU, and the operation that uses it, for its errors.
pub(super) struct Gpu {
    pub(super) device: CudaDevice,
    op: &'static str,
}

impl Gpu {
    /// The GPU that holds `tensor`, made this thread's.
    pub(super) fn of(op: &'static str, tensor: &Tensor) -> Result<Self> {
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
    pub(super) fn op(&self) -> &'static str {
        self.op
    }

    /// Puts a copy of `len` values on the GPU's stream.
    ///
    /// # Safety
    /// Both must hold `len` values, not the same ones.
    pub(super) unsafe fn copy<T: DeviceRepr>(
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
    pub(super) fn blocks(&self, blocks: usize, block: u32, shared_bytes: usize) -> Result<Launch> {
        self.grid([blocks, 1, 1], block, shared_bytes)
    }

    /// A grid in three dimensions.
    pub(super) fn grid(&self, grid: [usize; 3], block: u32, shared_bytes: usize) -> Result<Launch> {
        let [x, y, z] = grid;
        if y > 65535 || z > 65535 {
            bail!(
                "{}: a grid of {x} x {y} x {z} blocks is too large: the last two end at 65535",
                self.op
            )
        }
        let (x, shared_bytes) = (self.u32(x)?, self.u32(shared_bytes)?);
        let grid = (x, y as u32, z as u32);
        Ok(Launch::new(
            self.device.cuda_stream(),
            grid,
            block,
            shared_bytes,
        ))
    }

    /// A launch that loops over `len` values.
    pub(super) fn elements(&self, len: usize) -> Result<Launch> {
        self.blocks(len.div_ceil(2048).min(MAX_BLOCKS), BLOCK, 0)
    }

    /// A launch that loops over `rows`, a block for each.
    pub(super) fn rows(&self, rows: usize, block: u32, shared_bytes: usize) -> Result<Launch> {
        self.blocks(rows.min(MAX_BLOCKS), block, shared_bytes)
    }

    /// Memory for `len` values, not yet written.
    pub(super) fn alloc<T: Element>(&self, len: usize) -> Result<Fresh<T>> {
        Fresh::new(&self.device, len)
    }

    /// Memory for `len` ids or positions, not yet written.
    pub(super) fn alloc_u32(&self, len: usize) -> Result<Fresh<u32>> {
        Fresh::new(&self.device, len)
    }

    /// Memory for `len` sums, not yet written.
    pub(super) fn alloc_f64(&self, len: usize) -> Result<Fresh<f64>> {
        Fresh::new(&self.device, len)
    }

    /// A size as kernels take it.
    pub(super) fn i32(&self, size: usize) -> Result<i32> {
        i32::try_from(size).or_else(|_| bail!("{}: {size} is more than kernels count to", self.op))
    }

    /// A size as kernels take it.
    pub(super) fn u32(&self, size: usize) -> Result<u32> {
        u32::try_from(size).or_else(|_| bail!("{}: {size} is more than kernels count to", self.op))
    }

    /// The values of `tensor`, which must be contiguous and on this GPU.
    pub(super) fn read<'a, T: CudaDType + WithDType>(
        &self,
        what: &str,
        tensor: &'a Tensor,
    ) -> Result<Values<'a>> {
        self.check::<T>(what, tensor)?;
        Values::new::<T>(tensor)
    }

    /// Lets `write` change the values of `dst`, which must be contiguous.
    pub(super) fn write<T: CudaDType + WithDType + DeviceRepr>(
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

/// The values of a tensor under candle's read lock.
pub(super) struct Values<'a> {
    _guard: StorageRef<'a>,
    address: u64,
}

impl<'a> Values<'a> {
    fn new<T: CudaDType>(tensor: &'a Tensor) -> Result<Self> {
        let (guard, layout) = tensor.storage_and_layout();
        let address = match &*guard {
            Storage::Cuda(storage) => address::<T>(storage, layout)?,
            _ => bail!("expected values on CUDA"),
        };
        Ok(Self {
            _guard: guard,
            address,
        })
    }

    /// The values; `T` is the type they were checked for.
    pub(super) fn get<T>(&self) -> In<'_, T> {
        In::new(self.address)
    }
}

fn address<T: CudaDType>(storage: &CudaStorage, layout: &Layout) -> Result<u64> {
    let slice = storage.as_cuda_slice::<T>()?;
    // Everything on this device is on one stream, so there is no event to wait for or record.
    let (start, _) = slice.device_ptr(slice.stream());
    Ok(start + (layout.start_offset() * size_of::<T>()) as u64)
}

/// New values on the GPU.
pub(super) struct Fresh<T> {
    slice: CudaSlice<T>,
    device: CudaDevice,
}

impl<T: CudaDType + DeviceRepr> Fresh<T> {
    pub(super) fn new(device: &CudaDevice, len: usize) -> Result<Self> {
        // SAFETY: the callers' kernels write every value before anything reads it. An allocation of nothing is an error
        // to CUDA.
        let slice = unsafe { device.alloc::<T>(len.max(1)) }?;
        Ok(Self {
            slice,
            device: device.clone(),
        })
    }

    /// Where a kernel writes.
    pub(super) fn out(&self) -> Out<'_, T> {
        let (start, _) = self.slice.device_ptr(self.slice.stream());
        Out::new(start)
    }

    /// The values as what an operation returns.
    pub(super) fn into_output(self, shape: impl Into<Shape>) -> OpOutput {
        OpOutput::on_cuda(CudaStorage::wrap_cuda_slice(self.slice, self.device), shape)
    }

    /// The values as a tensor outside any graph.
    pub(super) fn into_tensor(self, shape: impl Into<Shape>) -> Tensor {
        self.into_output(shape).into_tensor()
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

/// An error unless all of `tensors` have the shape of the first.
pub(super) fn same_shape(op: &str, tensors: &[(&str, &Tensor)]) -> Result<()> {
    for (what, tensor) in tensors {
        let (first, expected) = tensors[0];
        if tensor.dims() != expected.dims() {
            bail!(
                "{op}: expected {what} of the shape of {first} {:?}, got {:?}",
                expected.dims(),
                tensor.dims()
            )
        }
    }
    Ok(())
}

/// An error unless `tensor`, the argument `what`, has the dimensions `dims`.
pub(super) fn dims_must_be(op: &str, what: &str, tensor: &Tensor, dims: &[usize]) -> Result<()> {
    if tensor.dims() != dims {
        bail!("{op}: expected {what} {dims:?}, got {:?}", tensor.dims())
    }
    Ok(())
}
