//! Cross-entropy of whole rows of logits: `loss = ln(sum exp(logit)) - logit[target]`.

use crate::host::HostU32;
use crate::vocab_shard::{cross_entropy_grad, row_max, sum_exp_and_target_logit};
use crate::{IGNORE_INDEX, with_backward1};
use candle_core::{Result, Tensor, bail};

const NAME: &str = "cross_entropy";

/// The loss of each row, not reduced; rows whose target is [`IGNORE_INDEX`] give 0 and no gradient.
///
/// Keeps the logits and one number per row for the backward, never a probability matrix. Relative error against f64
/// about 4e-8, that of the gradient 8e-8: see `docs/accuracy.md`.
///
/// # Shapes
/// `logits (n, v)` f32 or bf16, `targets (n)` u32 -> `(n)` f32, in nats.
///
/// # Errors
/// When a target is not an id of the vocabulary, the shapes do not fit, or a tensor has another dtype or device.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let &[n, v] = logits.dims() else {
        bail!("{NAME}: expected logits (n, v), got {:?}", logits.dims())
    };
    let (logits_value, targets) = (logits.detach(), targets.detach());
    let ids = HostU32::new(NAME, "targets", &targets)?;
    if let Some(id) = ids
        .read()
        .iter()
        .find(|&&id| id != IGNORE_INDEX && id as usize >= v)
    {
        bail!(
            "{NAME}: target {id} is not in the vocabulary of {v} ids\nhint: the tokenizer and the model must belong together"
        )
    }
    let max = row_max(&logits_value)?;
    let pieces = sum_exp_and_target_logit(&logits_value, &max, &targets, 0)?;
    let (max, pieces, ids) = (max.to_vec1::<f32>()?, pieces.to_vec2::<f32>()?, ids.read());
    let mut loss = vec![0f32; n];
    let mut log_sum_exp = vec![0f32; n];
    for row in 0..n {
        let log_sum = pieces[0][row].ln();
        log_sum_exp[row] = max[row] + log_sum;
        if ids[row] != IGNORE_INDEX {
            loss[row] = log_sum - pieces[1][row];
        }
    }
    drop(ids);
    let log_sum_exp = Tensor::from_vec(log_sum_exp, n, logits.device())?;
    with_backward1(logits, (loss, n), NAME, move |grad| {
        Ok(Some(cross_entropy_grad(
            &logits_value,
            &log_sum_exp,
            &targets,
            0,
            grad,
        )?))
    })
}
