//! A value with a hand-written backward: the bridge between our kernels and candle's graph.
//!
//! candle's custom operations compute inside the graph, from storages. Here the value is computed first, by any means
//! (a kernel, a collective, another graph), and then entered into the graph with the function that maps its gradient
//! to the gradients of its inputs.

use crate::brain_float::rounded;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, Result, Shape,
    Storage, Tensor, bail,
};
use std::sync::{Mutex, PoisonError};

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
    /// `values`, exactly as many as `shape` has elements, as they are for f32, rounded once for bf16.
    pub(crate) fn rounded(values: Vec<f32>, dtype: DType, shape: impl Into<Shape>) -> Self {
        let storage = match dtype {
            DType::BF16 => CpuStorage::BF16(rounded(&values)),
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

    fn into_storage(self, name: &'static str) -> Result<(Storage, Shape)> {
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

/// A graph node: the value until candle takes it, and the backward, a function of that value and its gradient.
struct Node<F> {
    name: &'static str,
    value: Mutex<Option<(Storage, Shape)>>,
    bwd: F,
}

impl<F> Node<F> {
    fn new(name: &'static str, out: OpOutput, bwd: F) -> Result<Self> {
        let value = Mutex::new(Some(out.into_storage(name)?));
        Ok(Self { name, value, bwd })
    }

    fn take(&self) -> Result<(Storage, Shape)> {
        match self
            .value
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
        {
            Some(value) => Ok(value),
            None => bail!(
                "{}: the value of this graph node was already taken",
                self.name
            ),
        }
    }

    fn take_cpu(&self) -> Result<(CpuStorage, Shape)> {
        match self.take()? {
            (Storage::Cpu(storage), shape) => Ok((storage, shape)),
            _ => bail!("{}: the inputs are on the CPU, the value is not", self.name),
        }
    }

    fn take_cuda(&self) -> Result<(CudaStorage, Shape)> {
        match self.take()? {
            (Storage::Cuda(storage), shape) => Ok((storage, shape)),
            _ => bail!("{}: the inputs are on CUDA, the value is not", self.name),
        }
    }
}

impl<F> CustomOp1 for Node<F>
where
    F: Fn(&Tensor, &Tensor) -> Result<Option<Tensor>>,
{
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.take_cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.take_cuda()
    }

    fn bwd(&self, _: &Tensor, value: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        (self.bwd)(value, grad)
    }
}

impl<F> CustomOp2 for Node<F>
where
    F: Fn(&Tensor, &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)>,
{
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.take_cpu()
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.take_cuda()
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        value: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        (self.bwd)(value, grad)
    }
}

impl<F> CustomOp3 for Node<F>
where
    F: Fn(&Tensor, &Tensor) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)>,
{
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.take_cpu()
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.take_cuda()
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        value: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        (self.bwd)(value, grad)
    }
}

/// Enters `out`, computed from `x`, into candle's graph with `bwd` as its backward.
///
/// `bwd` receives the gradient of `out` (shape of `out`) and returns the gradient of `x` (shape of `x`). It must
/// return `Some` when `x` is tracked and not itself a variable: candle panics on an inner node without a gradient.
/// `None` is for variables and untracked inputs.
///
/// `out` and every tensor that `bwd` captures must be detached (`Tensor::detach`, no copy): a captured tracked tensor
/// keeps its whole graph alive for as long as this node lives.
///
/// If `x` is not tracked, `out` comes back as it is, without a graph.
///
/// # Errors
/// When a graph is needed and `out` and `x` are on different devices, or neither on the CPU nor on CUDA.
pub fn with_backward1<F>(
    x: &Tensor,
    out: impl Into<OpOutput>,
    name: &'static str,
    bwd: F,
) -> Result<Tensor>
where
    F: Fn(&Tensor) -> Result<Option<Tensor>> + Send + Sync + 'static,
{
    let out = out.into();
    if !x.track_op() {
        return Ok(out.into_tensor());
    }
    x.apply_op1(Node::new(name, out, move |_: &Tensor, grad: &Tensor| {
        bwd(grad)
    })?)
}

/// [`with_backward1`] for a value computed from `x` and `y`; `bwd` returns their gradients in this order.
///
/// # Errors
/// As [`with_backward1`].
pub fn with_backward2<F>(
    x: &Tensor,
    y: &Tensor,
    out: impl Into<OpOutput>,
    name: &'static str,
    bwd: F,
) -> Result<Tensor>
where
    F: Fn(&Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> + Send + Sync + 'static,
{
    let out = out.into();
    if !x.track_op() && !y.track_op() {
        return Ok(out.into_tensor());
    }
    x.apply_op2(
        y,
        Node::new(name, out, move |_: &Tensor, grad: &Tensor| bwd(grad))?,
    )
}

/// [`with_backward1`] for a value computed from `x`, `y` and `z`; `bwd` returns their gradients in this order.
///
/// # Errors
/// As [`with_backward1`].
pub fn with_backward3<F>(
    x: &Tensor,
    y: &Tensor,
    z: &Tensor,
    out: impl Into<OpOutput>,
    name: &'static str,
    bwd: F,
) -> Result<Tensor>
where
    F: Fn(&Tensor) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)>
        + Send
        + Sync
        + 'static,
{
    with_backward3_of_result(x, y, z, out, name, move |_, grad| bwd(grad))
}

/// [`with_backward3`] with a backward that reads the value, too, and so need not keep it.
pub(crate) fn with_backward3_of_result<F>(
    x: &Tensor,
    y: &Tensor,
    z: &Tensor,
    out: impl Into<OpOutput>,
    name: &'static str,
    bwd: F,
) -> Result<Tensor>
where
    F: Fn(&Tensor, &Tensor) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)>
        + Send
        + Sync
        + 'static,
{
    let out = out.into();
    if !x.track_op() && !y.track_op() && !z.track_op() {
        return Ok(out.into_tensor());
    }
    x.apply_op3(y, z, Node::new(name, out, bwd)?)
}
