//! A value with a hand-written backward: the bridge between our kernels and candle's graph.
//!
//! candle's custom operations compute inside the graph, from storages. Here the value is computed first, by any means
//! (a kernel, a collective, another graph), and then entered into the graph with the function that maps its gradient
//! to the gradients of its inputs.

use super::op_output::OpOutput;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, Layout, Result, Shape, Storage,
    Tensor, bail,
};
use std::sync::{Mutex, PoisonError};

/// The gradients of the inputs, from the value and its gradient.
type Backward = dyn Fn(&Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync;

/// A graph node: the value until candle takes it, and the backward.
struct Node {
    name: &'static str,
    value: Mutex<Option<(Storage, Shape)>>,
    bwd: Box<Backward>,
}

impl Node {
    fn take(&self) -> Result<(Storage, Shape)> {
        let value = self.value.lock();
        match value.unwrap_or_else(PoisonError::into_inner).take() {
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

/// The node as candle's operation of these inputs, each of which comes as a storage and its layout.
macro_rules! custom_op {
    ($custom_op:ident($($input:ident),*) -> $grads:ty) => {
        impl $custom_op for Node {
            fn name(&self) -> &'static str {
                self.name
            }

            fn cpu_fwd(&self, $(_: &CpuStorage, $input: &Layout),*) -> Result<(CpuStorage, Shape)> {
                self.take_cpu()
            }

            fn cuda_fwd(&self, $(_: &CudaStorage, $input: &Layout),*) -> Result<(CudaStorage, Shape)> {
                self.take_cuda()
            }

            fn bwd(&self, $($input: &Tensor,)* value: &Tensor, grad: &Tensor) -> Result<$grads> {
                let mut grads = (self.bwd)(value, grad)?.into_iter();
                $(let $input = grads.next().flatten();)*
                Ok(($($input),*))
            }
        }
    };
}

custom_op!(CustomOp1(_x) -> Option<Tensor>);
custom_op!(CustomOp2(_x, _y) -> (Option<Tensor>, Option<Tensor>));
custom_op!(CustomOp3(_x, _y, _z) -> (Option<Tensor>, Option<Tensor>, Option<Tensor>));

/// Enters `out`, computed from one to three `inputs`, into candle's graph with `bwd` as its backward.
///
/// `bwd` receives the gradient of `out` (shape of `out`) and returns those of the inputs (in their shapes). It must
/// return `Some` for an input that is tracked and not itself a variable: candle panics on an inner node without a gradient.
/// `None` is for variables and untracked inputs.
///
/// `out` and every tensor that `bwd` captures must be detached (`Tensor::detach`, no copy): a captured tracked tensor
/// keeps its whole graph alive for as long as this node lives.
///
/// If no input is tracked, `out` comes back as it is, without a graph.
///
/// # Errors
/// When a graph is needed and `out` and the inputs are on different devices, or neither on the CPU nor on CUDA.
pub fn with_backward<const N: usize>(
    inputs: [&Tensor; N],
    out: impl Into<OpOutput>,
    name: &'static str,
    bwd: impl Fn(&Tensor) -> Result<[Option<Tensor>; N]> + Send + Sync + 'static,
) -> Result<Tensor> {
    with_backward_of_result(inputs, out, name, move |_, grad| bwd(grad))
}

/// [`with_backward`] with a backward that reads the value, too, and so need not keep it.
pub(crate) fn with_backward_of_result<const N: usize>(
    inputs: [&Tensor; N],
    out: impl Into<OpOutput>,
    name: &'static str,
    bwd: impl Fn(&Tensor, &Tensor) -> Result<[Option<Tensor>; N]> + Send + Sync + 'static,
) -> Result<Tensor> {
    const { assert!(N >= 1 && N <= 3, "candle's nodes have one to three inputs") }
    let out = out.into();
    if !inputs.iter().any(|input| input.track_op()) {
        return Ok(out.into_tensor());
    }
    let node = Node {
        name,
        value: Mutex::new(Some(out.into_storage(name)?)),
        bwd: Box::new(move |value, grad| bwd(value, grad).map(Vec::from)),
    };
    match inputs.as_slice() {
        [x] => x.apply_op1(node),
        [x, y] => x.apply_op2(y, node),
        [x, y, z] => x.apply_op3(y, z, node),
        inputs => bail!("{name}: a node of {} inputs", inputs.len()),
    }
}
