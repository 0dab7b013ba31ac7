//! What an operation computed, before it is known whether it enters a graph.

use crate::cpu::half_precision::rounded;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Layout, Result, Shape, Storage, Tensor, WithDType, bail};

/// The computed value of an operation on its way into the graph.
///
/// Built from a `Tensor` (copied once if it enters a graph, because candle does not let a storage out of a tensor) or
/// from a `(CpuStorage, Shape)`, contiguous and of exactly as many elements, which is moved.
pub struct OpOutput(Value);

enum Value {
    Tensor(Tensor),
    Storage(Storage, Shape),
}

impl From<Tensor> for OpOutput {
    fn from(tensor: Tensor) -> Self {
        Self(Value::Tensor(tensor))
    }
}

impl<S: Into<Shape>> From<(CpuStorage, S)> for OpOutput {
    fn from((storage, shape): (CpuStorage, S)) -> Self {
        Self(Value::Storage(Storage::Cpu(storage), shape.into()))
    }
}

impl<S: Into<Shape>> From<(Vec<f32>, S)> for OpOutput {
    fn from((values, shape): (Vec<f32>, S)) -> Self {
        Self::from((CpuStorage::F32(values), shape))
    }
}

impl OpOutput {
    /// `values`, exactly as many as `shape` has elements.
    pub(crate) fn of<T: WithDType>(values: Vec<T>, shape: impl Into<Shape>) -> Self {
        Self::from((T::to_cpu_storage_owned(values), shape))
    }

    /// `values`, exactly as many as `shape` has elements, as they are for f32, rounded once for bf16 and f16.
    pub(crate) fn rounded(values: Vec<f32>, dtype: DType, shape: impl Into<Shape>) -> Self {
        let storage = match dtype {
            DType::BF16 => CpuStorage::BF16(rounded(&values)),
            DType::F16 => CpuStorage::F16(rounded(&values)),
            _ => CpuStorage::F32(values),
        };
        Self::from((storage, shape))
    }

    /// What a kernel wrote: at least as many values as `shape` has elements.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_cuda(storage: CudaStorage, shape: impl Into<Shape>) -> Self {
        Self(Value::Storage(Storage::Cuda(storage), shape.into()))
    }

    /// The value as a tensor outside any graph, without a copy.
    pub fn into_tensor(self) -> Tensor {
        match self.0 {
            Value::Tensor(tensor) => tensor,
            Value::Storage(storage, shape) => {
                Tensor::from_storage(storage, shape, BackpropOp::none(), false)
            }
        }
    }

    /// The value as candle takes it into a graph, by the node `name`.
    pub(crate) fn into_storage(self, name: &'static str) -> Result<(Storage, Shape)> {
        let tensor = match self.0 {
            Value::Storage(storage, shape) => return Ok((storage, shape)),
            Value::Tensor(tensor) => tensor,
        };
        let (guard, layout) = tensor.storage_and_layout();
        let storage = match &*guard {
            Storage::Cpu(storage) => Storage::Cpu(copied(storage, layout)?),
            Storage::Cuda(storage) => Storage::Cuda(copied(storage, layout)?),
            Storage::Metal(_) => bail!("{name}: expected a value on the CPU or on CUDA"),
        };
        Ok((storage, tensor.shape().clone()))
    }
}

/// The values of a view, contiguous.
fn copied<S>(source: &S, layout: &Layout) -> Result<S>
where
    S: BackendStorage,
    S::Device: BackendDevice<Storage = S>,
{
    let num_values = layout.shape().elem_count();
    // An allocation of nothing is an error to CUDA.
    let mut storage = source
        .device()
        .zeros_impl(&Shape::from(num_values.max(1)), source.dtype())?;
    if num_values > 0 {
        source.copy_strided_src(&mut storage, 0, layout)?;
    }
    Ok(storage)
}
