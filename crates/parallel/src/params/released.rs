//! Values of parameters that leave memory and come back, behind the tensors that layers captured (for ZeRO-3 and offload).
//!
//! A layer keeps the tensor that it was built with, and so do candle_nn's own layers and nodes of candle's graph. So the tensor
//! stays, and what is exchanged is its storage, which all clones share.

use std::sync::{Mutex, PoisonError};

use candle_comm::message_of;
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CudaStorage, DType, Device, Error, InplaceOp1, Layout, Result, Tensor, Var, bail,
};

use super::param::Param;

/// Type of the empty storage that stands for released values: no operation takes it, so a read is an error of candle's.
const RELEASED: DType = DType::F4;

impl Param {
    /// Frees the local values. Every read is an error until [`Self::refill`].
    pub(super) fn release(&self) -> Result<()> {
        self.of_products.forget();
        self.pending.wait_for_all()?;
        if self.is_present() {
            let values = self.var.as_detached_tensor();
            values.inplace_op1(&Exchange::new(None))?;
        }
        Ok(())
    }

    /// An error unless `values` has the parameter's local shape, type and device.
    pub(super) fn check_fits(&self, values: &Tensor) -> Result<()> {
        let var = self.var.as_detached_tensor();
        if values.dims() != var.dims() || values.dtype() != var.dtype() {
            bail!(
                "parameter {} cannot be refilled with {:?} values of shape {:?}; expected {:?} of shape {:?}",
                self.name,
                values.dtype(),
                values.shape(),
                var.dtype(),
                var.shape()
            );
        }
        if !values.device().same_device(var.device()) {
            bail!(
                "parameter {} is on {:?} and cannot be refilled from {:?}\nhint: move the values with to_device",
                self.name,
                var.device().location(),
                values.device().location()
            );
        }
        Ok(())
    }

    /// Gives the parameter values again; `values` has its local shape and type.
    pub(super) fn refill(&self, values: &Tensor) -> Result<()> {
        self.check_fits(values)?;
        // A storage of its own, without what a view leaves out.
        self.adopt(&values.force_contiguous()?)
    }

    /// Gives the parameter the storage of `values`, which begin it, have the parameter's local shape and type, and cannot be read
    /// any more. What follows them in their storage stays in memory.
    pub(super) fn adopt(&self, values: &Tensor) -> Result<()> {
        self.check_fits(values)?;
        if !values.is_contiguous() || values.layout().start_offset() > 0 {
            bail!(
                "parameter {} cannot take over values that do not begin their storage",
                self.name
            );
        }
        self.pending.wait_for_all()?;
        self.of_products.forget();
        move_storage(values, &self.var.as_detached_tensor())
    }

    /// Whether the local values are in memory.
    pub fn is_present(&self) -> bool {
        let (storage, _) = self.var.storage_and_layout();
        storage.dtype() != RELEASED
    }

    /// An error that names the parameter if its values were released.
    pub(crate) fn check_present(&self) -> Result<()> {
        if self.is_present() {
            return Ok(());
        }
        bail!(
            "the values of parameter {} are not in memory: they were released, or replicas divide them (ZeRO-3) or they are offloaded, and its \
             block is not running\nhint: refill what was released before its block runs; Parameters::values gets what is divided or offloaded",
            self.name
        )
    }
}

/// Whether an error may tell of an operation on values that are not in memory.
pub(crate) fn is_about_released(error: &Error) -> bool {
    let message = message_of(error);
    // candle's kernels of one input do not say which type they lack.
    if message.contains("this dtype") {
        return true;
    }
    let mut words = message.split(|letter: char| !letter.is_alphanumeric());
    words.any(|word| word == format!("{RELEASED:?}"))
}

/// Gives `to`, and all tensors that share its storage, the storage of `from`, which has its type and device and cannot be read any more.
pub(crate) fn move_storage(from: &Tensor, to: &Tensor) -> Result<()> {
    let take = Exchange::new(None);
    from.inplace_op1(&take)?;
    to.inplace_op1(&Exchange::new(take.into_taken()))
}

/// A variable without values. A GPU allocates no 0 bytes, so its storage is that of one value.
pub(super) fn empty_var(dims: Vec<usize>, dtype: DType, device: &Device) -> Result<Var> {
    let one = Tensor::zeros(1, dtype, device)?;
    let (storage, layout) = one.storage_and_layout();
    let storage = storage.try_clone(layout)?;
    Var::from_tensor(&Tensor::from_storage(
        storage,
        dims,
        BackpropOp::none(),
        true,
    ))
}

/// The storage of a tensor: what is put in, then what was taken out.
struct Exchange(Mutex<Option<Stored>>);

enum Stored {
    Cpu(CpuStorage),
    Cuda(CudaStorage),
}

impl Exchange {
    /// `None` puts the empty storage in.
    fn new(put: Option<Stored>) -> Self {
        Self(Mutex::new(put))
    }

    fn into_taken(self) -> Option<Stored> {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl InplaceOp1 for Exchange {
    fn name(&self) -> &'static str {
        "exchange of a parameter's storage"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        let mut stored = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let put = match stored.take() {
            None => CpuStorage::F4(Vec::new()),
            Some(Stored::Cpu(put)) => put,
            Some(Stored::Cuda(_)) => bail!("values of a GPU for a parameter on the CPU"),
        };
        *stored = Some(Stored::Cpu(std::mem::replace(storage, put)));
        Ok(())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        let mut stored = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let put = match stored.take() {
            None => empty_on_gpu(storage)?,
            Some(Stored::Cuda(put)) => put,
            Some(Stored::Cpu(_)) => bail!("values of the CPU for a parameter on a GPU"),
        };
        *stored = Some(Stored::Cuda(std::mem::replace(storage, put)));
        Ok(())
    }
}

#[cfg(feature = "cuda")]
fn empty_on_gpu(storage: &CudaStorage) -> Result<CudaStorage> {
    use candle_core::cuda_backend::CudaStorageSlice;
    let device = candle_core::backend::BackendStorage::device(storage).clone();
    Ok(CudaStorage {
        // A GPU allocates no 0 bytes.
        slice: CudaStorageSlice::F4(device.alloc_zeros::<u8>(1)?),
        device,
    })
}

#[cfg(not(feature = "cuda"))]
fn empty_on_gpu(_: &CudaStorage) -> Result<CudaStorage> {
    bail!("a parameter on a GPU in a build without CUDA")
}
