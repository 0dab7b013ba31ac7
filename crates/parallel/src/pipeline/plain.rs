//! Model parts in plain candle: a [`Layer`] that keeps its input and its output in candle's graph, and a [`Head`] that makes its graph in the
//! backward half.

use candle_core::{DType, Result, Tensor, Var, bail};
use candle_ops::with_backward;

use super::graph::KeptNodes;
use crate::layers::{Head, Layer};
use crate::pass::{GradientSink, Loss, Pass};

/// What users run into.
pub(super) const CUTTING: &str = "candle_nn's RmsNorm, LayerNorm, rope and softmax_last_dim cut the graph; candle_ops has rms_norm, layer_norm \
    and rope that do not";

/// A block in plain candle, which candle differentiates.
///
/// It must depend on its input and on each of its trainable parameters by operations that have a backward: what does not is
/// reported by name in the backward pass, unless another path goes around it, as in `xs * softmax_last_dim(xs)`, whose
/// gradient is wrong without a word. Parallel layers take part by [`Layer::apply`](crate::Layer::apply).
///
/// What is computed from parameters is computed in the forward pass: a `cat`, `contiguous` or `to_dtype` of a weight while the block is
/// built keeps the initial values for ever, though gradients flow through it; views such as `t` and `narrow` may be made then. What is
/// trained is asked for from the block's [`ParamBuilder`](crate::ParamBuilder), also if another block has it
/// ([`ParamBuilder::tied`](crate::ParamBuilder::tied)): a [`Var`] of one's own is an error. Every tensor-parallel rank enters the same
/// regions in the same order, also where it has no rows for them, and draws the same random numbers: [`Pass::dropout`] does.
pub trait PlainBlock: Send + Sync {
    /// The block's output in candle's graph; for inputs and outputs see [`Block`](crate::Block).
    ///
    /// # Errors
    /// What the block's operations return.
    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor>;
}

impl<F> PlainBlock for F
where
    F: Fn(&Tensor, &Pass) -> Result<Tensor> + Send + Sync,
{
    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        self(xs, pass)
    }
}

/// The last block of a model in plain candle, which candle differentiates; as for [`PlainBlock`].
pub trait PlainHead: Send + Sync {
    /// The loss for what the block before gave, in candle's graph.
    ///
    /// # Errors
    /// What the block's operations return.
    fn loss(&self, xs: &Tensor, pass: &Pass) -> Result<Loss>;

    /// What the model says of some rows: see [`Head::logits`].
    ///
    /// # Errors
    /// What the block's operations return; that a model has none, if this is left out.
    fn logits(&self, _xs: &Tensor, _rows: &[usize], _pass: &Pass) -> Result<Tensor> {
        bail!("this model's head gives no logits\nhint: PlainHead::logits is for them")
    }
}

/// A [`PlainBlock`] as a [`Layer`], or a [`PlainHead`] as a [`Head`].
pub(super) struct Plain<M> {
    model: M,
    kept: KeptNodes,
}

/// What stands for the block's input in the graph (`None` for ids), its output there, and the losses that it added.
pub(super) struct Graph {
    input: Option<Var>,
    output: Tensor,
    added: Vec<Tensor>,
}

impl<M> Plain<M> {
    pub fn new(model: M) -> Self {
        Self {
            model,
            kept: KeptNodes::default(),
        }
    }
}

impl<M: PlainBlock> Layer for Plain<M> {
    type Saved = Graph;

    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<(Tensor, Graph)> {
        let input = leaf(xs)?;
        let xs = input.as_ref().map_or(xs, Var::as_tensor);
        let pass = pass.of_plain_block();
        let output = self.model.forward(xs, &pass)?;
        let graph = Graph {
            added: pass.added(),
            input,
            output,
        };
        Ok((graph.output.detach(), graph))
    }

    fn backward(
        &self,
        graph: Graph,
        dy: &Tensor,
        pass: &Pass,
        gradients: &mut dyn GradientSink,
    ) -> Result<Option<Tensor>> {
        self.kept.check(&graph.output, pass, gradients)?;
        graph.backward(dy, pass, gradients)
    }

    fn infer(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        Ok(self.model.forward(xs, &pass.of_plain_block())?.detach())
    }

    fn weights(&self) -> Vec<&Tensor> {
        Vec::new()
    }
}

impl<M: PlainHead> Head for Plain<M> {
    fn loss(
        &self,
        xs: &Tensor,
        pass: &Pass,
        gradients: &mut dyn GradientSink,
    ) -> Result<(Loss, Option<Tensor>)> {
        let input = leaf(xs)?;
        let xs = input.as_ref().map_or(xs, Var::as_tensor);
        let pass = &pass.of_plain_block();
        let mut loss = self.model.loss(xs, pass)?;
        check_scalar(&loss)?;
        self.kept.check(&loss.sum, pass, gradients)?;
        let dy = Tensor::full(pass.loss_scale(), (), loss.sum.device())?;
        let dy = dy.to_dtype(loss.sum.dtype())?;
        let output = loss.sum.clone();
        loss.sum = output.detach();
        let graph = Graph {
            added: pass.added(),
            input,
            output,
        };
        let dx = graph.backward(&dy, pass, gradients)?;
        Ok((loss, dx))
    }

    fn evaluate(&self, xs: &Tensor, pass: &Pass) -> Result<Loss> {
        let loss = self.model.loss(xs, pass)?;
        check_scalar(&loss)?;
        Ok(Loss {
            sum: loss.sum.detach(),
            ..loss
        })
    }

    fn logits(&self, xs: &Tensor, rows: &[usize], pass: &Pass) -> Result<Tensor> {
        Ok(self.model.logits(xs, rows, pass)?.detach())
    }
}

fn check_scalar(loss: &Loss) -> Result<()> {
    if loss.sum.rank() != 0 {
        bail!(
            "the last block returned losses of shape {:?}; expected a scalar, the sum of the losses of the micro-batch",
            loss.sum.shape()
        );
    }
    Ok(())
}

/// What stands for `xs` in a graph; `None` for ids, which have no gradient.
fn leaf(xs: &Tensor) -> Result<Option<Var>> {
    match xs.dtype().is_float() {
        true => Var::from_tensor(xs).map(Some),
        false => Ok(None),
    }
}

impl Graph {
    /// The gradient of the input from that of the output; those of the variables go to `gradients`.
    fn backward(
        self,
        dy: &Tensor,
        pass: &Pass,
        gradients: &mut dyn GradientSink,
    ) -> Result<Option<Tensor>> {
        let mut root = seed(&self.output, dy.clone())?;
        for loss in self.added.iter().filter(|loss| loss.track_op()) {
            root =
                (root.to_dtype(DType::F32)? + (loss.to_dtype(DType::F32)? * pass.loss_scale())?)?;
        }
        let mut grads = match root.track_op() {
            true => root.backward()?,
            false => Default::default(),
        };
        let input = self.input;
        let is_input = |node: &Tensor| input.as_ref().is_some_and(|input| input.id() == node.id());
        for node in root.sorted_nodes() {
            if !node.is_variable() || is_input(node) {
                continue;
            }
            if let Some(grad) = grads.remove(node) {
                gradients.put_grad(node, grad)?;
            }
        }
        let Some(input) = input else { return Ok(None) };
        Ok(grads.remove(&input))
    }
}

/// A scalar whose backward gives `output` the gradient `upstream`: candle's `backward` takes no gradient to start from.
fn seed(output: &Tensor, upstream: Tensor) -> Result<Tensor> {
    if output.dims() != upstream.dims() {
        bail!(
            "the gradient of the output has shape {:?}; expected that of the output, {:?}",
            upstream.shape(),
            output.shape()
        );
    }
    let root = Tensor::zeros((), DType::F32, output.device())?.to_dtype(output.dtype())?;
    with_backward([output], root, "seed", move |_| {
        Ok([Some(upstream.clone())])
    })
}
