//! A value with a hand-written backward: the bridge between our kernels and candle's graph.
//!
//! candle's custom operations compute inside the graph, from storages. Here the value is computed first, by any means
//! (a kernel, a collective, another graph), and then entered into the graph with the function that maps its gradient
//! to the gradients of its inputs.

use crate::brain_float::rounded;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cpu_backend::CpuDevice;
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, Result, Shape, Storage, Tensor,
    bail,
};
use std::sync::{Mutex, PoisonError};

/// The computed value of an operation on its way into the graph.
///
/// Built from a `Tensor` (copied once if it enters a graph, because candle does not let a storage out of a tensor) or
/// from a `(CpuStorage, Shape)`, contiguous and of exactly as many elements, which is moved.
pub struct OpOutput(Value);

enum Value {
    Tensor(Tensor),
    Host(CpuStorage, Shape),
}

impl From<Tensor> for OpOutput {
    fn from(tensor: Tensor) -> Self {
        Self(Value::Tensor(tensor))
    }
}

impl<S: Into<Shape>> From<(CpuStorage, S)> for OpOutput {
    fn from((storage, shape): (CpuStorage, S)) -> Self {
        Self(Value::Host(storage, shape.into()))
    }
}

impl<S: Into<Shape>> From<(Vec<f32>, S)> for OpOutput {
    fn from((values, shape): (Vec<f32>, S)) -> Self {
        Self(Value::Host(CpuStorage::F32(values), shape.into()))
    }
}

impl OpOutput {
    /// `values`, exactly as many as `shape` has elements, as they are for f32, rounded once for bf16.
    pub(crate) fn rounded(values: Vec<f32>, dtype: DType, shape: impl Into<Shape>) -> Self {
        let storage = match dtype {
            DType::BF16 => CpuStorage::BF16(rounded(&values)),
            _ => CpuStorage::F32(values),
        };
        Self(Value::Host(storage, shape.into()))
    }

    /// The value as a tensor outside any graph, without a copy.
    pub fn into_tensor(self) -> Tensor {
        match self.0 {
            Value::Tensor(tensor) => tensor,
            Value::Host(storage, shape) => {
                Tensor::from_storage(Storage::Cpu(storage), shape, BackpropOp::none(), false)
            }
        }
    }

    fn into_host(self, name: &'static str) -> Result<(CpuStorage, Shape)> {
        let tensor = match self.0 {
            Value::Host(storage, shape) => return Ok((storage, shape)),
            Value::Tensor(tensor) => tensor,
        };
        let shape = tensor.shape().clone();
        let (guard, layout) = tensor.storage_and_layout();
        let Storage::Cpu(source) = &*guard else {
            bail!(
                "{name}: a value with a hand-written backward lives on the CPU for now, got device {:?}, dtype {:?}",
                tensor.device().location(),
                tensor.dtype()
            )
        };
        let mut storage = CpuDevice.zeros_impl(&shape, tensor.dtype())?;
        if shape.elem_count() > 0 {
            source.copy_strided_src(&mut storage, 0, layout)?;
        }
        Ok((storage, shape))
    }
}

/// A graph node: the value until candle takes it, and the backward.
struct Node<F> {
    name: &'static str,
    value: Mutex<Option<(CpuStorage, Shape)>>,
    bwd: F,
}

impl<F> Node<F> {
    fn new(name: &'static str, out: OpOutput, bwd: F) -> Result<Self> {
        let value = Mutex::new(Some(out.into_host(name)?));
        Ok(Self { name, value, bwd })
    }

    fn take(&self) -> Result<(CpuStorage, Shape)> {
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
}

impl<F> CustomOp1 for Node<F>
where
    F: Fn(&Tensor) -> Result<Option<Tensor>>,
{
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.take()
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        (self.bwd)(grad)
    }
}

impl<F> CustomOp2 for Node<F>
where
    F: Fn(&Tensor) -> Result<(Option<Tensor>, Option<Tensor>)>,
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
        self.take()
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        (self.bwd)(grad)
    }
}

impl<F> CustomOp3 for Node<F>
where
    F: Fn(&Tensor) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)>,
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
        self.take()
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        (self.bwd)(grad)
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
/// When a graph is needed and `out` or `x` is not on the CPU.
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
    x.apply_op1(Node::new(name, out, bwd)?)
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
    x.apply_op2(y, Node::new(name, out, bwd)?)
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
    let out = out.into();
    if !x.track_op() && !y.track_op() && !z.track_op() {
        return Ok(out.into_tensor());
    }
    x.apply_op3(y, z, Node::new(name, out, bwd)?)
}
