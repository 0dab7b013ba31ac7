//! Cross-entropy over logits of which each rank holds some columns of the vocabulary, after Megatron-LM
//! (arXiv:1909.08053), with the statistics of a row's softmax from one pass over it (arXiv:1805.02867).
//!
//! `loss = log_sum_exp - logit[target]`, `log_sum_exp = max + ln(sum exp(logit - max))`,
//! `dlogit = (exp(logit - log_sum_exp) - onehot(target)) * grad`.

use crate::cpu::chunks::{for_each_chunk, rows_per_chunk};
use crate::cpu::element::{Element, by_float};
use crate::cpu::exp::exp;
use crate::cpu::filled::copied;
use crate::cpu::lanes;
use crate::cpu::vectorised::vectorised;
use crate::host::floats::HostFloats;
use crate::host::in_place::in_place;
use crate::host::on_cuda::on_cuda;
use crate::host::op_output::OpOutput;
use crate::host::values::Host;
use candle_core::{Device, Result, Tensor, bail};

/// Target id that marks a position without a target: it adds nothing to the loss and gets no gradient.
pub const IGNORE_INDEX: u32 = u32::MAX;

/// Columns summed in f32 before the sum goes on in f64.
const BLOCK: usize = 1024;

/// Columns whose maximum is found before they are summed: 32 KiB, which the cache still has then.
const CACHED: usize = 8 * BLOCK;

/// Numbers that [`softmax_stats`] gives for a row.
const STATS: usize = 3;

/// Of each row over the local columns: the largest logit, the sum of `exp(logit - largest)`, NaN if a logit is, and the
/// target's logit if it is local, else 0. An empty row has `f32::MIN`, 0 and 0, which adds nothing to those of other shards.
///
/// The local columns are the vocabulary `vocab_start .. vocab_start + v`; `targets` are ids of the whole vocabulary.
///
/// # Shapes
/// `logits (n, v)` f32, bf16 or f16, `targets (n)` u32 -> `(n, 3)` f32, outside any graph.
///
/// # Errors
/// When the shapes do not fit or a tensor has another dtype or device.
pub fn softmax_stats(logits: &Tensor, targets: &Tensor, vocab_start: usize) -> Result<Tensor> {
    let op = "softmax_stats";
    let (n, v) = rows_of(op, logits)?;
    check_rows(op, n, &[("targets", targets)])?;
    on_cuda!(logits => super::vocab_shard_gpu::softmax_stats(logits, targets, vocab_start));
    let _timer = crate::timing::op_timer::op(op);
    let device = logits.device();
    let logits = HostFloats::new(op, "logits", logits)?;
    let targets = Host::<u32>::new(op, "targets", targets)?;
    let targets = targets.read();
    let mut stats = vec![0f32; STATS * n];
    let rows = rows_per_chunk(v);
    by_float!(logits.dtype(), T => {
        let logits = logits.read_as::<T>();
        let logits = &*logits;
        for_each_chunk(&mut stats, STATS * rows, logits.len(), |chunk, stats| {
            for (i, stats) in stats.chunks_exact_mut(STATS).enumerate() {
                let row = chunk * rows + i;
                let values = &logits[row * v..][..v];
                let (max, sum) = max_and_sum_exp(values);
                let hit = local_column(targets[row], vocab_start, v);
                let hit = hit.map(|column| values[column].widen());
                stats.copy_from_slice(&[max, sum, hit.unwrap_or_default()]);
            }
        });
    });
    Tensor::from_vec(stats, (n, STATS), device)
}

/// The loss of each row, and its log-sum-exp, from what all shards of the vocabulary have together.
///
/// `stats` is what [`softmax_stats`] gave for each shard, one after the other. The loss is 0 where the target is
/// [`IGNORE_INDEX`], and NaN where it is beyond the vocabulary of `vocab_size` ids: an error would have to wait for the GPU.
///
/// # Shapes
/// `stats (shards * n, 3)` f32, `targets (n)` u32 -> `(n)` and `(n)` f32, outside any graph.
///
/// # Errors
/// When the shapes do not fit or a tensor has another dtype or device.
pub fn cross_entropy_loss(
    stats: &Tensor,
    targets: &Tensor,
    vocab_size: usize,
) -> Result<(Tensor, Tensor)> {
    let (loss, log_sum_exp) = losses(stats, targets, vocab_size)?;
    Ok((loss.into_tensor(), log_sum_exp))
}

/// [`cross_entropy_loss`], of which the loss may enter a graph.
pub(crate) fn losses(
    stats: &Tensor,
    targets: &Tensor,
    vocab_size: usize,
) -> Result<(OpOutput, Tensor)> {
    let op = "cross_entropy_loss";
    let n = targets.elem_count();
    check_rows(op, n, &[("targets", targets)])?;
    match *stats.dims() {
        [rows, STATS] if rows == n || (rows > 0 && rows.is_multiple_of(n)) => {}
        ref dims => bail!("{op}: expected stats (shards * {n}, {STATS}), got {dims:?}"),
    }
    on_cuda!(stats => super::vocab_shard_gpu::cross_entropy_loss(stats, targets, vocab_size));
    let _timer = crate::timing::op_timer::op(op);
    let stats = Host::<f32>::new(op, "stats", stats)?;
    let targets = Host::<u32>::new(op, "targets", targets)?;
    let (stats, targets) = (stats.read(), targets.read());
    let (mut loss, mut log_sum_exp) = (vec![0f32; n], vec![0f32; n]);
    for (row, &target) in targets.iter().enumerate() {
        let shards = || stats.chunks_exact(STATS).skip(row).step_by(n);
        let max = shards().fold(f32::MIN, |max, shard| max.max(shard[0]));
        let sum: f64 = shards()
            .map(|shard| f64::from(shard[1]) * rescale(shard[0], max))
            .sum();
        let log_sum = (sum as f32).ln();
        log_sum_exp[row] = max + log_sum;
        if target != IGNORE_INDEX {
            let hit: f32 = shards().map(|shard| shard[2]).sum();
            let is_known = (target as usize) < vocab_size;
            loss[row] = if is_known {
                log_sum - (hit - max)
            } else {
                f32::NAN
            };
        }
    }
    let log_sum_exp = Tensor::from_vec(log_sum_exp, n, &Device::Cpu)?;
    Ok((OpOutput::from((loss, n)), log_sum_exp))
}

/// Gradient of the local logits: `(softmax - onehot(target)) * grad`, and 0 in rows with [`IGNORE_INDEX`].
///
/// # Shapes
/// `logits (n, v)`, `log_sum_exp (n)` (over the whole vocabulary), `targets (n)` u32, `grad (n)` (of the rows'
/// losses) -> `(n, v)` of the dtype of the logits; the rest is f32. Outside any graph.
///
/// # Errors
/// When the shapes do not fit or a tensor has another dtype or device.
pub fn cross_entropy_grad(
    logits: &Tensor,
    log_sum_exp: &Tensor,
    targets: &Tensor,
    vocab_start: usize,
    grad: &Tensor,
) -> Result<Tensor> {
    let op = "cross_entropy_grad";
    let (n, _v) = rows_of(op, logits)?;
    let rows = [
        ("log_sum_exp", log_sum_exp),
        ("targets", targets),
        ("grad", grad),
    ];
    check_rows(op, n, &rows)?;
    on_cuda!(logits => super::vocab_shard_gpu::cross_entropy_grad(logits, log_sum_exp, targets, vocab_start, grad));
    let _timer = crate::timing::op_timer::op(op);
    let grad = Host::<f32>::new(op, "grad", grad)?;
    let grad = grad.read();
    let values = HostFloats::new(op, "logits", logits)?;
    let copy = by_float!(values.dtype(), T => {
        OpOutput::of(copied(&values.read_as::<T>()), logits.shape())
    });
    let rows = (log_sum_exp, targets, vocab_start);
    rows_in_place(op, copy.into_tensor(), rows, |row| grad[row])
}

/// [`cross_entropy_grad`] in the storage of `logits`, with the one `grad` for all rows.
///
/// The caller must be the only owner of the values: every tensor that shares them changes too. They are copied first
/// only if they are not contiguous.
///
/// # Shapes
/// `logits (n, v)`, `log_sum_exp (n)` (over the whole vocabulary), `targets (n)` u32 -> `(n, v)` of the dtype of
/// the logits; the rest is f32. Outside any graph.
///
/// # Errors
/// When the shapes do not fit or a tensor has another dtype or device.
pub fn cross_entropy_grad_in_place(
    logits: Tensor,
    log_sum_exp: &Tensor,
    targets: &Tensor,
    vocab_start: usize,
    grad: f32,
) -> Result<Tensor> {
    let op = "cross_entropy_grad_in_place";
    let (n, _v) = rows_of(op, &logits)?;
    check_rows(op, n, &[("log_sum_exp", log_sum_exp), ("targets", targets)])?;
    on_cuda!(logits => {
        super::vocab_shard_gpu::cross_entropy_grad_in_place(logits, log_sum_exp, targets, vocab_start, grad)
    });
    let _timer = crate::timing::op_timer::op(op);
    rows_in_place(op, logits, (log_sum_exp, targets, vocab_start), |_| grad)
}

/// Turns logits into their gradient; `grad` is that of the loss of a row.
fn rows_in_place(
    op: &'static str,
    logits: Tensor,
    (log_sum_exp, targets, vocab_start): (&Tensor, &Tensor, usize),
    grad: impl Fn(usize) -> f32 + Sync,
) -> Result<Tensor> {
    let (n, v) = rows_of(op, &logits)?;
    let log_sum_exp = Host::<f32>::new(op, "log_sum_exp", log_sum_exp)?;
    let targets = Host::<u32>::new(op, "targets", targets)?;
    let (log_sum_exp, targets) = (log_sum_exp.read(), targets.read());
    if v == 0 {
        return Ok(logits);
    }
    let rows = rows_per_chunk(v);
    by_float!(logits.dtype(), T => in_place::<T>(op, "logits", logits, |logits| {
        for_each_chunk(logits, rows * v, n * v, |chunk, logits| {
            for (i, logits) in logits.chunks_exact_mut(v).enumerate() {
                let row = chunk * rows + i;
                let target = (targets[row], vocab_start);
                grad_of_row(logits, log_sum_exp[row], grad(row), target);
            }
        });
    }))
}

/// Turns a row of logits into their gradient.
fn grad_of_row<T: Element>(
    logits: &mut [T],
    log_sum_exp: f32,
    grad: f32,
    (target, vocab_start): (u32, usize),
) {
    if target == IGNORE_INDEX {
        return logits.fill(T::zero());
    }
    let scaled = |logit: T| exp(logit.widen() - log_sum_exp) * grad;
    let hit = local_column(target, vocab_start, logits.len());
    let hit = hit.map(|column| (column, T::nearest(scaled(logits[column]) - grad)));
    vectorised(
        #[inline(always)]
        || {
            for logit in logits.iter_mut() {
                *logit = T::nearest(exp(logit.widen() - log_sum_exp) * grad);
            }
        },
    );
    if let Some((column, value)) = hit {
        logits[column] = value;
    }
}

/// Rows and columns of the logits.
fn rows_of(op: &str, logits: &Tensor) -> Result<(usize, usize)> {
    match *logits.dims() {
        [n, v] => Ok((n, v)),
        ref dims => bail!("{op}: expected logits (n, v), got {dims:?}"),
    }
}

fn check_rows(op: &str, n: usize, tensors: &[(&str, &Tensor)]) -> Result<()> {
    for (what, tensor) in tensors {
        if tensor.dims() != [n] {
            bail!(
                "{op}: expected {what} ({n}), one per row of logits, got {:?}",
                tensor.dims()
            )
        }
    }
    Ok(())
}

fn local_column(target: u32, vocab_start: usize, v: usize) -> Option<usize> {
    let column = (target as usize).checked_sub(vocab_start)?;
    (target != IGNORE_INDEX && column < v).then_some(column)
}

/// The largest value and the sum of `exp(value - largest)`. What the values before add up to is scaled down where a larger one
/// comes. The first maximum is finite, so that minus infinity is never taken from itself.
fn max_and_sum_exp<T: Element>(values: &[T]) -> (f32, f32) {
    let (mut max, mut total) = (f32::MIN, 0f64);
    for cached in values.chunks(CACHED) {
        let before = max;
        let largest = vectorised(
            #[inline(always)]
            || lanes::max(cached, |x| x),
        );
        max = before.max(largest);
        if total != 0.0 {
            total *= rescale(before, max);
        }
        for block in cached.chunks(BLOCK) {
            let sum = vectorised(
                #[inline(always)]
                || lanes::sum(block, |x| exp(x - max)),
            );
            total += f64::from(sum);
        }
    }
    (max, total as f32)
}

/// The factor of a sum of `exp(logit - before)` that makes it one of `exp(logit - max)`.
fn rescale(before: f32, max: f32) -> f64 {
    (f64::from(before) - f64::from(max)).exp()
}
