//! One link of the chain that a model is.

use candle_core::{Result, Tensor};

use crate::gradients::Gradients;
use crate::micro_batch::MicroBatch;

/// Where a training pass puts what it computes beside its output.
pub struct TrainPass<'a> {
    /// The gradients of the parameters.
    pub gradients: &'a mut Gradients,
    /// Factor of the summed loss: 1 / number of targets of the global batch.
    pub loss_scale: f64,
}

/// A backward pass by hand: from the gradient of a block's output to that of its input (`None` for tokens), with the
/// gradients of the block's parameters written to the pass.
pub type Backward = Box<dyn FnOnce(Tensor, &mut TrainPass<'_>) -> Result<Option<Tensor>>>;

/// A part of a model between two borders of the tape: an embedding, a decoder layer, a head with its loss.
///
/// Inside it, plain candle autograd; between blocks, the [`crate::Tape`]. A block must depend on its input and on each of
/// its trainable parameters by operations that have a backward: what does not is reported by name in the backward pass.
pub trait Block: Send + Sync {
    /// The block's output. The first block of a model gets the tokens, (b, t) u32, as `xs`, on the CPU wherever the model
    /// computes, as are the batch's targets; blocks between get and give
    /// (b, t, hidden); the last block gives the sum of the losses over the micro-batch's targets, a scalar, or, if the
    /// micro-batch has no targets, the logits (b, t, vocab).
    fn forward(&self, xs: &Tensor, batch: &MicroBatch) -> Result<Tensor>;

    /// The block's output with a backward pass by hand, which the tape then runs instead of candle's.
    ///
    /// `None`, the default, lets candle differentiate [`Self::forward`]. A block that returns `Some` computes outside
    /// candle's graph and writes the gradient of each of its trainable parameters with [`Gradients::write`], in the forward
    /// or the backward pass. The gradient of the last block's output, the loss, is `pass.loss_scale`.
    fn forward_train(
        &self,
        _xs: &Tensor,
        _batch: &MicroBatch,
        _pass: &mut TrainPass<'_>,
    ) -> Result<Option<(Tensor, Backward)>> {
        Ok(None)
    }
}
