//! The contract of a layer with a backward pass of its own, and its door to candle's graph.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Result, Tensor, TensorId, bail};
use candle_ops::with_backward;

use crate::pass::{GradientSink, Pass, Tape, WeightGrad};

/// A link of the chain that a model is, as three functions: a forward pass that returns what the backward pass needs, that backward pass, and
/// a forward pass that keeps nothing.
///
/// All compute outside candle's graph. [`Self::apply`] makes a node of candle's graph of a layer, [`crate::layer_block`] a block
/// of a [`crate::ModelPart`].
pub trait Layer: Send + Sync {
    /// What the forward pass keeps for the backward pass.
    type Saved;

    /// The output for `xs`, and what [`Self::backward`] needs.
    ///
    /// # Errors
    /// Inputs of the wrong shape, and what operations and collectives return.
    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<(Tensor, Self::Saved)>;

    /// The gradient of the input from that of the output, `dy`; `None` for inputs that have none, as tokens. The gradients of
    /// the layer's weights are put into `gradients`, which computes them at once or later, when replicas that divide the weights may have freed
    /// them: what a gradient reads of weights is computed before it is put.
    ///
    /// # Errors
    /// As [`Self::forward`], and what `gradients` returns.
    fn backward(
        &self,
        saved: Self::Saved,
        dy: &Tensor,
        pass: &Pass,
        gradients: &mut dyn GradientSink,
    ) -> Result<Option<Tensor>>;

    /// The output alone; a layer that looks at other tokens overrides it for passes with a [cache](Pass::cache).
    ///
    /// # Errors
    /// As [`Self::forward`].
    fn infer(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        Ok(self.forward(xs, pass)?.0)
    }

    /// Every weight whose gradient [`Self::backward`] puts.
    fn weights(&self) -> Vec<&Tensor>;

    /// The output for `xs` as a node of candle's graph, differentiable in `xs` and in the layer's weights: so a layer is part of a
    /// [`PlainBlock`](crate::PlainBlock).
    ///
    /// # Errors
    /// As [`Self::forward`]. candle's `backward` returns the errors of [`Self::backward`].
    fn apply(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor>
    where
        Self: Clone + Sized + 'static,
        Self::Saved: Clone + Send + Sync + 'static,
    {
        let (out, saved) = self.forward(&xs.detach(), pass)?;
        let weights = self.weights().into_iter();
        let weights: Vec<Tensor> = weights.filter(|w| w.track_op()).cloned().collect();
        let grads = GraphGradients::new(&weights);
        let (layer, pass) = (self.clone(), pass.clone());
        let needs_grad = xs.track_op() && !xs.is_variable();
        let backward = {
            let grads = grads.clone();
            move |dy: &Tensor| {
                // What a backward pass that failed has left.
                grads.lock().iter_mut().for_each(|(_, grad)| *grad = None);
                let dx = layer.backward(saved.clone(), dy, &pass, &mut grads.clone())?;
                if needs_grad && dx.is_none() {
                    bail!("a layer gave no gradient of its input, which the graph before it needs")
                }
                Ok(dx)
            }
        };
        let join = grads.join(&weights)?;
        match join {
            None => with_backward([xs], out, NAME, move |dy| Ok([backward(dy)?])),
            // Tokens are on the CPU, wherever the weights are.
            Some(join) if !xs.track_op() => with_backward([&join], out, NAME, move |dy| {
                backward(dy)?;
                Ok([Some(scalar(dy.device())?)])
            }),
            Some(join) => with_backward([xs, &join], out, NAME, move |dy| {
                let dx = backward(dy)?;
                Ok([dx, Some(scalar(dy.device())?)])
            }),
        }
    }

    /// What stays in memory between the passes; `None` if the layer does not say, so that the memory of a model with it cannot be planned.
    fn tape(&self) -> Option<Tape> {
        None
    }
}

const NAME: &str = "layer";

/// The gradients of a layer's weights, from the layer's node in candle's graph to the weights.
///
/// A node of candle's graph has three inputs at most, a layer any number of weights. So the layer's node has one input for all of
/// them, a scalar that is computed from the weights one after the other; where candle's backward pass comes by a weight it
/// picks up that weight's gradient here, which the layer's backward pass has left.
#[derive(Clone)]
struct GraphGradients(Arc<Mutex<Vec<WeightGradient>>>);

/// A weight, and its gradient while it is here.
type WeightGradient = (TensorId, Option<Tensor>);

impl GraphGradients {
    fn new(weights: &[Tensor]) -> Self {
        let slots = weights.iter().map(|weight| (weight.id(), None));
        Self(Arc::new(Mutex::new(slots.collect())))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<WeightGradient>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The scalar that stands for all weights; `None` without any.
    fn join(&self, weights: &[Tensor]) -> Result<Option<Tensor>> {
        let mut join: Option<Tensor> = None;
        for (slot, weight) in weights.iter().enumerate() {
            let (grads, like) = (self.clone(), weight.detach());
            let is_variable = weight.is_variable();
            let pick_up = move || match grads.lock()[slot].1.take() {
                Some(grad) => grad.reshape(like.dims())?.to_dtype(like.dtype()).map(Some),
                None if is_variable => Ok(None),
                None => bail!(
                    "a layer wrote no gradient of a weight of shape {:?}, which the graph before it needs",
                    like.shape()
                ),
            };
            let zero = scalar(weight.device())?;
            join = Some(match join {
                None => with_backward([weight], zero, NAME, move |_| Ok([pick_up()?]))?,
                Some(earlier) => with_backward([&earlier, weight], zero, NAME, move |dy| {
                    Ok([Some(dy.clone()), pick_up()?])
                })?,
            });
        }
        Ok(join)
    }
}

impl GradientSink for GraphGradients {
    fn put(&mut self, weight: &Tensor, compute: WeightGrad) -> Result<()> {
        if !weight.track_op() {
            return Ok(());
        }
        let mut slots = self.lock();
        let Some((_, grad)) = slots.iter_mut().find(|(id, _)| *id == weight.id()) else {
            bail!(
                "a layer wrote the gradient of a weight of shape {:?} that its Layer::weights does not list",
                weight.shape()
            );
        };
        match grad {
            Some(grad) => compute(grad, true),
            None => {
                let zeros = Tensor::zeros(weight.elem_count(), DType::F32, weight.device())?;
                compute(&zeros, false)?;
                *grad = Some(zeros);
                Ok(())
            }
        }
    }
}

fn scalar(device: &Device) -> Result<Tensor> {
    Tensor::zeros((), DType::F32, device)
}
