//! What a layer says of the memory that it needs between passes.

use super::recompute::Recompute;

/// What of a layer stays in memory between its passes, in bytes for each row of a micro-batch (each token that the rank has) and without what is
/// small beside that: [`MemoryPlan`](crate::MemoryPlan) plans with it.
///
/// What waits is that of gradients which are computed later than those of inputs, as schedules of zero bubbles do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tape {
    /// Of the layer's input: all that is kept of a layer that is [computed again](Recompute::Full).
    pub input: usize,
    /// What the forward pass keeps for the backward pass, with the input if that is part of it: [`Layer::Saved`](crate::Layer::Saved).
    pub saved: usize,
    /// What the gradients of weights read that are put with [`GradientSink::put`](crate::GradientSink::put).
    pub waiting: usize,
    /// What those read beside it that are put with [`GradientSink::put_large`](crate::GradientSink::put_large).
    pub waiting_large: usize,
    /// What all of them read beside it if the weights may be freed before:
    /// [`WeightHalf::LaterWithoutWeights`](crate::WeightHalf::LaterWithoutWeights).
    pub waiting_without_weights: usize,
}

impl Tape {
    /// What is kept from the forward to the backward pass.
    pub(crate) fn kept(&self, recompute: Recompute) -> usize {
        match recompute {
            Recompute::None => self.saved,
            Recompute::Full => self.input,
        }
    }

    /// What is kept from the input half to the weight half of the backward pass; `without_large` if gradients that would keep more than the forward
    /// pass has kept do not wait, `weights_stay` if the weights are there until then.
    pub(crate) fn waits(
        &self,
        recompute: Recompute,
        without_large: bool,
        weights_stay: bool,
    ) -> usize {
        if without_large && recompute == Recompute::Full {
            return 0;
        }
        let large = if without_large { 0 } else { self.waiting_large };
        let instead = match weights_stay {
            true => 0,
            false => self.waiting_without_weights,
        };
        self.waiting + large + instead
    }
}
