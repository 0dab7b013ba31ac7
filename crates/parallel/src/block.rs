//! One link of the chain that a model is.

use candle_core::{Result, Tensor};

use crate::micro_batch::MicroBatch;

/// A part of a model between two borders of the tape: an embedding, a decoder layer, a head with its loss.
///
/// Inside it, plain candle autograd; between blocks, the [`crate::Tape`]. A block must depend on its input and on each of
/// its trainable parameters by operations that have a backward: what does not is reported by name in the backward pass.
pub trait Block: Send + Sync {
    /// The block's output. The first block of a model gets the tokens, (b, t) u32, as `xs`; blocks between get and give
    /// (b, t, hidden); the last block gives the sum of the losses over the micro-batch's targets, a scalar, or, if the
    /// micro-batch has no targets, the logits (b, t, vocab).
    fn forward(&self, xs: &Tensor, batch: &MicroBatch) -> Result<Tensor>;
}
