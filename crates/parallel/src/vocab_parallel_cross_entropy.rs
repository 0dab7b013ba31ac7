//! Cross-entropy of logits whose vocabulary is divided over tensor-parallel ranks: loss_i = log Σ_j exp(z_ij) − z_i,target
//! (arXiv:1909.08053, section 3). Ranks exchange three numbers per token instead of the logits.

use candle_comm::{ProcessGroup, ReduceOp};
use candle_core::{Result, Tensor, bail};
use candle_ops::{
    IGNORE_INDEX, cross_entropy_grad, row_max, sum_exp_and_target_logit, with_backward1,
};

use crate::shard::Shard;

/// Loss of each token: logits (n, local_vocab) of the vocabulary's part `shard`, targets (n) u32 -> (n) f32.
///
/// Targets are ids of the whole vocabulary; one that is [`IGNORE_INDEX`] gives 0 and no gradient, one beyond the
/// vocabulary is an error.
pub fn vocab_parallel_cross_entropy(
    logits: &Tensor,
    targets: &Tensor,
    shard: &Shard,
    tp: &ProcessGroup,
) -> Result<Tensor> {
    let (n, local_vocab) = logits.dims2()?;
    if targets.dims() != [n] || local_vocab != shard.len() {
        bail!(
            "vocab_parallel_cross_entropy: logits {:?} and targets {:?}; expected (n, {}) and (n)",
            logits.shape(),
            targets.shape(),
            shard.len()
        );
    }
    check_targets(targets, shard.global)?;
    let z = logits.detach();
    let max = tp.all_reduce(&row_max(&z)?, ReduceOp::Max)?;
    let sums = sum_exp_and_target_logit(&z, &max, targets, shard.range.start)?;
    let sums = tp.all_reduce(&sums, ReduceOp::Sum)?;
    let log_sum_exp = sums.get(0)?.log()?;
    let is_valid = targets.ne(IGNORE_INDEX)?.to_dtype(log_sum_exp.dtype())?;
    let losses = ((&log_sum_exp - sums.get(1)?)? * is_valid)?;
    let log_sum_exp = (log_sum_exp + max)?;
    let (targets, vocab_start) = (targets.clone(), shard.range.start);
    with_backward1(
        logits,
        losses,
        "vocab_parallel_cross_entropy",
        move |grad| {
            let grad = cross_entropy_grad(&z, &log_sum_exp, &targets, vocab_start, grad)?;
            Ok(Some(grad))
        },
    )
}

fn check_targets(targets: &Tensor, vocab_size: usize) -> Result<()> {
    let ids = targets.to_vec1::<u32>()?;
    let is_foreign = |&id: &u32| id != IGNORE_INDEX && id as usize >= vocab_size;
    if let Some(position) = ids.iter().position(is_foreign) {
        bail!(
            "target id {} at position {position} is beyond the vocabulary of {vocab_size} tokens\nhint: the tokenizer \
             does not belong to this model",
            ids[position]
        );
    }
    Ok(())
}
