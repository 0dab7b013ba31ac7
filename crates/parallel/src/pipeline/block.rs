//! One link of the chain that a model is.

use candle_core::{Result, Tensor, Var};

use super::micro_batch::MicroBatch;
use super::recompute::Recompute;
use crate::layers::{GradientSink, Layer};

/// A training pass of one micro-batch, as a block sees it.
pub struct Pass<'a> {
    /// The micro-batch.
    pub batch: &'a MicroBatch,
    /// Takes gradients of parameters.
    pub gradients: &'a mut dyn GradientSink,
    /// The gradient of the loss, the last block's output. The engine trains on the sum of the losses, so it is 1 but for types
    /// whose small gradients vanish.
    pub loss_scale: f64,
    /// What to keep for the backward pass. [`Recompute::Full`] is the engine's work, not the block's.
    pub recompute: Recompute,
}

/// What a block hands to the tape for its backward pass.
pub enum Backward {
    /// From the gradient of the block's output to that of its input (`None` for tokens); the gradients of the block's
    /// parameters are written to the sink.
    Explicit(Explicit),
    /// The output is the loss: its gradient was known in the forward pass, [`Pass::loss_scale`], and is in all that follows.
    Loss(Loss),
    /// candle differentiates, from `output` down to `input` (`None` for tokens).
    Graph {
        /// What stands for the block's input in the graph.
        input: Option<Var>,
        /// The block's output, in the graph.
        output: Tensor,
    },
}

/// See [`Backward::Explicit`].
pub type Explicit = Box<dyn FnOnce(Tensor, &mut dyn GradientSink) -> Result<Option<Tensor>>>;
/// See [`Backward::Loss`].
pub type Loss = Box<dyn FnOnce(&mut dyn GradientSink) -> Result<Option<Tensor>>>;

/// A part of a model between two borders of the tape: an embedding, a decoder layer, a head with its loss.
///
/// A [`Layer`] becomes a block by [`layer_block`], a model part in plain candle by [`plain_block`]. A head whose loss has an
/// explicit backward pass implements the trait itself.
///
/// Tensor-parallel ranks get and give the same, bit by bit. Only where what passes between blocks has another shape than (b, t, hidden) may
/// it be a part of its own on each, of the sequence for example.
///
/// The first block of a model gets the tokens, (b, t) u32, as `xs`, on the CPU wherever the model computes, as are the batch's
/// targets; blocks between get and give (b, t, hidden); the last block gives the sum of the losses over the micro-batch's
/// targets, a scalar, or, if the micro-batch has no targets, the logits (b, t, vocab).
pub trait Block: Send + Sync {
    /// The block's output, and its backward pass. The gradient of each trainable parameter is written to the pass's sink, now or
    /// in the backward pass: one that is not is an error that names it.
    ///
    /// # Errors
    /// What the block's operations return.
    fn forward(&self, xs: &Tensor, pass: &mut Pass<'_>) -> Result<(Tensor, Backward)>;

    /// The block's output; nothing is kept for a backward pass. The last block may give, instead of the sum of the losses, that and how many
    /// targets have the largest logit, (2) f64: see [`linear_predictions`](crate::linear_predictions).
    ///
    /// # Errors
    /// What the block's operations return.
    fn infer(&self, xs: &Tensor, batch: &MicroBatch) -> Result<Tensor>;
}

/// A block in plain candle, which candle differentiates.
///
/// It must depend on its input and on each of its trainable parameters by operations that have a backward: what does not is
/// reported by name in the backward pass. Parallel layers take part as candle modules.
///
/// What is computed from parameters is computed in the forward pass: a `cat`, `contiguous` or `to_dtype` of a weight while the block is
/// built keeps the initial values for ever, though gradients flow through it; views such as `t` and `narrow` may be made then. What is
/// trained is asked for from the block's [`ParamBuilder`](crate::ParamBuilder), also if another block has it
/// ([`ParamBuilder::tied`](crate::ParamBuilder::tied)): a [`Var`] of one's own is an error. Every tensor-parallel rank enters the same
/// regions in the same order, also where it has no rows for them, and draws the same random numbers.
pub trait PlainBlock: Send + Sync {
    /// The block's output in candle's graph; for inputs and outputs see [`Block`].
    ///
    /// # Errors
    /// What the block's operations return.
    fn forward(&self, xs: &Tensor, batch: &MicroBatch) -> Result<Tensor>;

    /// As [`Self::forward`], while nothing is trained: for a block that drops values at random, or does something else in training only.
    ///
    /// # Errors
    /// As [`Self::forward`].
    fn infer(&self, xs: &Tensor, batch: &MicroBatch) -> Result<Tensor> {
        self.forward(xs, batch)
    }
}

/// A block that is one layer.
pub fn layer_block<L>(layer: L) -> Box<dyn Block>
where
    L: Layer + Clone + Send + Sync + 'static,
    L::Saved: 'static,
{
    Box::new(LayerBlock(layer))
}

/// A block that candle differentiates.
pub fn plain_block(block: impl PlainBlock + 'static) -> Box<dyn Block> {
    Box::new(InCandle(block))
}

struct LayerBlock<L>(L);

impl<L> Block for LayerBlock<L>
where
    L: Layer + Clone + Send + Sync + 'static,
    L::Saved: 'static,
{
    fn forward(&self, xs: &Tensor, pass: &mut Pass<'_>) -> Result<(Tensor, Backward)> {
        let (out, mut saved) = self.0.forward_of_batch(xs, pass.batch)?;
        if pass.recompute == Recompute::Selective {
            self.0.forget(&mut saved);
        }
        let layer = self.0.clone();
        let backward = move |dy: Tensor, gradients: &mut dyn GradientSink| {
            layer.backward(saved, &dy, gradients)
        };
        Ok((out, Backward::Explicit(Box::new(backward))))
    }

    fn infer(&self, xs: &Tensor, batch: &MicroBatch) -> Result<Tensor> {
        self.0.infer(xs, batch)
    }
}

struct InCandle<B>(B);

impl<B: PlainBlock> Block for InCandle<B> {
    fn forward(&self, xs: &Tensor, pass: &mut Pass<'_>) -> Result<(Tensor, Backward)> {
        let input = match xs.dtype().is_float() {
            true => Some(Var::from_tensor(xs)?),
            false => None,
        };
        let leaf = input.as_ref().map_or(xs, Var::as_tensor);
        let output = self.0.forward(leaf, pass.batch)?;
        Ok((output.detach(), Backward::Graph { input, output }))
    }

    fn infer(&self, xs: &Tensor, batch: &MicroBatch) -> Result<Tensor> {
        Ok(self.0.infer(xs, batch)?.detach())
    }
}
