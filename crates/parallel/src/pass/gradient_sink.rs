//! Where the gradients of weights go.

use candle_core::{Result, Tensor, bail};
use candle_ops::add_into;

/// A gradient of a weight that is still to be computed. It gets the gradient's place, a flat view of f32, row-major, and whether to add to
/// it: if not, what lies there is left over and must be overwritten. It owns all that it reads.
pub type WeightGrad = Box<dyn FnOnce(&Tensor, bool) -> Result<()> + Send>;

/// When the gradients of weights are computed: the weight half of a backward pass, beside the input half that gives the gradient of the
/// input (Zero Bubble, arXiv:2401.10241).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightHalf {
    /// Each as soon as it is known how.
    AtOnce,
    /// When the input half is over, with the weights in their places still.
    Later,
    /// When the input half is over and replicas that divide the weights (ZeRO-3) have freed them: a job must not read any.
    LaterWithoutWeights,
}

/// Takes the gradients of weights, in f32.
pub trait GradientSink {
    /// Takes the gradient of `weight`, which `grad` computes, at once or later; drops it unseen if the weight is frozen.
    ///
    /// # Errors
    /// A trainable weight that the sink does not know, and what `grad` returns if it runs at once.
    fn put(&mut self, weight: &Tensor, grad: WeightGrad) -> Result<()>;

    /// As [`Self::put`], of a gradient that keeps more until a weight half than the forward pass has kept for it: a schedule that is to hold no more
    /// than that has it computed at once.
    ///
    /// # Errors
    /// As for [`Self::put`].
    fn put_large(&mut self, weight: &Tensor, grad: WeightGrad) -> Result<()> {
        self.put(weight, grad)
    }

    /// Takes a gradient of `weight` that is computed already, in the weight's shape and in f32, bf16 or f16: to wait would only keep it.
    ///
    /// # Errors
    /// Another shape, and as for [`Self::put`].
    fn put_grad(&mut self, weight: &Tensor, grad: Tensor) -> Result<()> {
        if grad.dims() != weight.dims() {
            bail!(
                "the gradient of {} has shape {:?}; expected that of the weight, {:?}",
                self.name_of(weight).as_deref().unwrap_or("a weight"),
                grad.shape(),
                weight.shape()
            );
        }
        let add_to = move |dst: &Tensor, add| add_into(dst, add, &grad);
        self.put(weight, Box::new(add_to))
    }

    /// When what is put here is computed: a layer that would have to keep much until then may compute it again instead.
    fn weight_half(&self) -> WeightHalf {
        WeightHalf::AtOnce
    }

    /// What a weight is called, if the sink knows.
    fn name_of(&self, _weight: &Tensor) -> Option<String> {
        None
    }
}
