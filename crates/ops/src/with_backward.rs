//! A value with a hand-written backward: the bridge between our kernels and candle's graph.
//!
//! candle's custom operations compute inside the graph, from storages. Here the value is computed first, by any means
//! (a kernel, a collective, another graph), and then entered into the graph with the function that maps its gradient
//! to the gradients of its inputs.

use crate::OpOutput;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, Layout, Result, Shape, Storage,
    Tensor, bail,
};
use std::sync::{Mutex, PoisonError};

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
