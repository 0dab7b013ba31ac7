//! Cross-entropy of whole rows of logits: `loss = ln(sum exp(logit)) - logit[target]`.

use super::vocab_shard::{IGNORE_INDEX, cross_entropy_grad, losses, softmax_stats};
use crate::host::values::Host;
use crate::host::with_backward::with_backward;
use candle_core::{Result, Tensor, bail};

const NAME: &str = "cross_entropy";

/// The loss of each row, not reduced; rows whose target is [`IGNORE_INDEX`] give 0 and no gradient.
///
/// Keeps the logits and one number per row for the backward, never a probability matrix. Relative error against f64
/// about 4e-8, that of the gradient 8e-8: see `docs/accuracy.md`.
///
/// # Shapes
/// `logits (n, v)` f32, bf16 or f16, `targets (n)` u32 -> `(n)` f32, in nats.
///
/// # Errors
/// When a target is not an id of the vocabulary (on a GPU, where checking would stall it, such a loss is NaN), the shapes do not fit, or a tensor has another dtype or device.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let &[_n, v] = logits.dims() else {
        bail!("{NAME}: expected logits (n, v), got {:?}", logits.dims())
    };
    let (logits_value, targets) = (logits.detach(), targets.detach());
    if targets.device().is_cpu() {
        check_targets(&targets, v)?;
    }
    let stats = softmax_stats(&logits_value, &targets, 0)?;
    let (loss, log_sum_exp) = losses(&stats, &targets, v)?;
    with_backward([logits], loss, NAME, move |grad| {
        let grad = cross_entropy_grad(&logits_value, &log_sum_exp, &targets, 0, grad)?;
        Ok([Some(grad)])
    })
}

fn check_targets(targets: &Tensor, v: usize) -> Result<()> {
    let ids = Host::<u32>::new(NAME, "targets", targets)?;
    let ids = ids.read();
    let is_foreign = |&&id: &&u32| id != IGNORE_INDEX && id as usize >= v;
    match ids.iter().find(is_foreign) {
        Some(id) => bail!(
            "{NAME}: target {id} is not in the vocabulary of {v} ids\nhint: the tokenizer and the model must belong together"
        ),
        None => Ok(()),
    }
}
