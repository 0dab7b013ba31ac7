//! The contract of the last link of a chain.

use candle_core::{Result, Tensor};

use crate::pass::{GradientSink, Loss, Pass, Tape};

/// The last link of a chain. Its loss is a thing of the backward half, so that the last stage's forward pass takes no longer than that of its
/// other blocks.
pub trait Head: Send + Sync {
    /// The loss for `xs`, what the block before gave, and the gradient of `xs`, if that has one: of the sum of the losses times
    /// [`Pass::loss_scale`]. The gradients of the head's weights are put into `gradients`.
    ///
    /// # Errors
    /// What operations, collectives and `gradients` return.
    fn loss(
        &self,
        xs: &Tensor,
        pass: &Pass,
        gradients: &mut dyn GradientSink,
    ) -> Result<(Loss, Option<Tensor>)>;

    /// The loss alone, and if the head knows how many predictions are right.
    ///
    /// # Errors
    /// As [`Self::loss`].
    fn evaluate(&self, xs: &Tensor, pass: &Pass) -> Result<Loss>;

    /// What the model says of some rows of the micro-batch, given by their indices in (b · t): (rows, vocab).
    ///
    /// # Errors
    /// As [`Self::loss`].
    fn logits(&self, xs: &Tensor, rows: &[usize], pass: &Pass) -> Result<Tensor>;

    /// As [`Layer::tape`](crate::Layer::tape), of a head: what is kept until the loss is its input.
    fn tape(&self) -> Option<Tape> {
        None
    }
}
