//! Cross-entropy of logits whose vocabulary is divided over tensor-parallel ranks: loss_i = log Σ_j exp(z_ij) − z_i,target
//! (arXiv:1909.08053, section 3). Ranks exchange three numbers per token instead of the logits.

use candle_comm::ProcessGroup;
use candle_core::{DType, Result, Tensor, bail};
use candle_ops::{
    GpuSettings, IGNORE_INDEX, cross_entropy_grad, cross_entropy_grad_in_place, cross_entropy_loss,
    linear_weight_grad_into, softmax_stats, sum_into, upload, with_backward,
};

use super::head_by_tiles::HeadByTiles;
use crate::params::TiledWeight;
use crate::pass::{GradientSink, Region, WeightHalf};
use crate::placement::Shard;

/// Rows of logits that exist at once in [`linear_cross_entropy`] on the CPU.
const CHUNK_ROWS: usize = 512;

/// The same on a GPU, at least: each chunk reads and writes the whole gradient of the weight in f32, which takes as long as the
/// product of 512 rows, and few rows leave most of the GPU idle. 1 GiB of bf16 for a vocabulary of 128k.
const GPU_CHUNK_ROWS: usize = 4096;

/// And as many more, in multiples of these, as fit into 2 GiB: 8192 for that vocabulary.
const GPU_LOGITS_BYTES: usize = 2 << 30;

/// Loss of each token: logits (n, local_vocab) of the vocabulary's part `shard`, targets (n) u32 -> (n) f32.
///
/// Targets are ids of the whole vocabulary; one that is [`IGNORE_INDEX`] gives 0 and no gradient, one beyond the vocabulary
/// is an error. Targets belong on the CPU, wherever the logits are: those on a GPU are not checked, as the host would have to
/// wait for them, and one beyond the vocabulary gives NaN.
///
/// # Errors
/// Shapes that do not fit, a target beyond the vocabulary, and what ends collectives.
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
    let targets = checked_targets(targets, logits, shard.global())?;
    let z = logits.detach();
    let (losses, log_sum_exp) = losses(&z, &targets, shard, tp)?;
    let vocab_start = shard.start();
    with_backward(
        [logits],
        losses,
        "vocab_parallel_cross_entropy",
        move |grad| {
            let grad = cross_entropy_grad(&z, &log_sum_exp, &targets, vocab_start, grad)?;
            Ok([Some(grad)])
        },
    )
}

/// Sum of the losses of a projection to the vocabulary, and the gradient of its input, in one go: logits = xs · weightᵀ.
///
/// xs (n, hidden), weight (local_vocab, hidden) of the vocabulary's part `shard`, targets (n) u32, on the CPU as for
/// [`vocab_parallel_cross_entropy`] -> the sum over the valid targets, an f64 scalar, and the gradient of that sum times `loss_scale` for the input as the [`Region`]
/// is left, (n, hidden) or (1, own rows, hidden); that of the weight, so
/// scaled, is put into `gradients`. Rows
/// are worked on in chunks, forward and backward, so that the logits never exist as a whole: three products, and a fourth where the weight
/// half of the backward pass waits. No graph.
///
/// A weight that comes tile by tile comes twice, and its product with the rows is computed twice, first for the losses, then for the
/// gradients: what tiles contribute to the losses is put together like what tensor-parallel ranks do.
///
/// # Errors
/// As for [`vocab_parallel_cross_entropy`].
pub fn linear_cross_entropy(
    xs: &Tensor,
    weight: &TiledWeight,
    targets: &Tensor,
    shard: &Shard,
    region: impl Into<Region>,
    loss_scale: f64,
    gradients: &mut dyn GradientSink,
) -> Result<(Tensor, Tensor)> {
    let (n, _hidden) = xs.dims2()?;
    let region = region.into();
    let tp = region.tp();
    let targets = checked_targets(targets, xs, shard.global())?;
    if weight.is_tiled() {
        let head = HeadByTiles {
            chunk_rows: chunk_rows(xs, shard, tp)?,
            targets,
            xs: xs.clone(),
            weight: weight.clone(),
            shard: shard.clone(),
            tp: tp.clone(),
        };
        return head.losses_and_grad(&region, loss_scale as f32, gradients);
    }
    let (tiled, weight) = (weight, weight.tensor());
    let sum = Tensor::zeros((), DType::F64, xs.device())?;
    let chunk_rows = chunk_rows(xs, shard, tp)?;
    let mut grads = Vec::with_capacity(n.div_ceil(chunk_rows));
    // Without rows, as a context-parallel rank may be, there is a gradient of zeros.
    for first in (0..n.max(1)).step_by(chunk_rows) {
        let rows = chunk_rows.min(n - first);
        let (x, y) = (xs.narrow(0, first, rows)?, targets.narrow(0, first, rows)?);
        let z = tiled.whole().forward(&x, None)?; // (rows, local_vocab)
        let (losses, log_sum_exp) = losses(&z, &y, shard, tp)?;
        sum_into(&sum, true, &losses)?;
        let scale = loss_scale as f32;
        let vocab_start = shard.start();
        let dz = cross_entropy_grad_in_place(z, &log_sum_exp, &y, vocab_start, scale)?;
        grads.push(tiled.whole().input_grad(&dz)?);
        if gradients.weight_half() == WeightHalf::Later {
            // The logits' gradient of all rows would take more memory than anything else: their product is computed again.
            drop(dz);
            let own = tiled.clone();
            let grad = move |dst: &Tensor, add| {
                let z = own.whole().forward(&x, None)?;
                let dz = cross_entropy_grad_in_place(z, &log_sum_exp, &y, vocab_start, scale)?;
                linear_weight_grad_into(dst, add, &dz, &x)
            };
            gradients.put(weight, Box::new(grad))?;
        } else {
            let grad = move |dst: &Tensor, add| linear_weight_grad_into(dst, add, &dz, &x);
            gradients.put(weight, Box::new(grad))?;
        }
    }
    let partial = match grads.as_slice() {
        [grad] => grad.clone(),
        grads => Tensor::cat(grads, 0)?,
    };
    Ok((sum, region.leave(&partial)?))
}

/// What a projection to the vocabulary predicts, without a backward pass: logits = xs · weightᵀ.
///
/// As for [`linear_cross_entropy`], xs (n, hidden), weight (local_vocab, hidden), targets (n) -> f64 scalars on the host: the sum of the
/// losses, and how many of the valid targets have the largest logit of their row, of equal ones the first. Ranks of `tp` send each other four
/// numbers a row.
///
/// # Errors
/// As for [`vocab_parallel_cross_entropy`].
pub fn linear_predictions(
    xs: &Tensor,
    weight: &TiledWeight,
    targets: &Tensor,
    shard: &Shard,
    tp: &ProcessGroup,
) -> Result<[Tensor; 2]> {
    let head = HeadByTiles {
        chunk_rows: chunk_rows(xs, shard, tp)?,
        targets: checked_targets(targets, xs, shard.global())?,
        xs: xs.clone(),
        weight: weight.clone(),
        shard: shard.clone(),
        tp: tp.clone(),
    };
    head.predictions()
}

/// Rows of logits that exist at once. They depend on what all ranks of `tp` know, as these exchange numbers for each chunk.
fn chunk_rows(xs: &Tensor, shard: &Shard, tp: &ProcessGroup) -> Result<usize> {
    if xs.device().is_cpu() {
        return Ok(CHUNK_ROWS);
    }
    if let Some(rows) = GpuSettings::get()?.head_chunk_rows {
        return Ok(rows.get());
    }
    let row_bytes = shard.global().div_ceil(tp.world_size()) * xs.dtype().size_in_bytes();
    Ok((GPU_LOGITS_BYTES / row_bytes.max(1) / GPU_CHUNK_ROWS).max(1) * GPU_CHUNK_ROWS)
}

/// Loss of each row, (n), 0 without a target, and the logarithm of its Σ exp(z) over the whole vocabulary, (n).
fn losses(
    z: &Tensor,
    targets: &Tensor,
    shard: &Shard,
    tp: &ProcessGroup,
) -> Result<(Tensor, Tensor)> {
    let stats = softmax_stats(z, targets, shard.start())?; // (n, 3)
    cross_entropy_loss(&tp.all_gather(&stats, 0)?, targets, shard.global())
}

/// The targets where `xs` is.
fn checked_targets(targets: &Tensor, xs: &Tensor, vocab_size: usize) -> Result<Tensor> {
    if !targets.device().is_cpu() {
        return targets.to_device(xs.device());
    }
    let ids = targets.to_vec1::<u32>()?;
    check_targets(&ids, vocab_size)?;
    upload(ids, targets.dims(), xs.device())
}

fn check_targets(ids: &[u32], vocab_size: usize) -> Result<()> {
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
