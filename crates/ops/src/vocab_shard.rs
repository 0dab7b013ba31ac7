//! Cross-entropy over logits of which each rank holds some columns of the vocabulary: the pieces between which the
//! ranks communicate (the maximum of the maxima, the sum of the sums), after Megatron-LM (arXiv:1909.08053).
//!
//! `loss = log_sum_exp - logit[target]`, `log_sum_exp = max + ln(sum exp(logit - max))`,
//! `dlogit = (exp(logit - log_sum_exp) - onehot(target)) * grad`.

use crate::IGNORE_INDEX;
use crate::OpOutput;
use crate::chunks::{for_each_chunk, for_each_chunk2, rows_per_chunk};
use crate::dispatch::on_cuda;
use crate::exp::exp;
use crate::host::{HostF32, HostU32};
use crate::host_floats::HostFloats;
use crate::in_place::in_place;
use crate::lanes;
use crate::vectorised::vectorised;
use candle_core::{Device, Result, Tensor, bail};

/// Columns summed in f32 before the sum goes on in f64.
const BLOCK: usize = 1024;

/// The maximum of each row; minus infinity where a row is empty.
///
/// # Shapes
/// `logits (n, v)` f32 or bf16 -> `(n)` f32, outside any graph.
///
/// # Errors
/// When `logits` has not two dimensions or is not f32 or bf16.
pub fn row_max(logits: &Tensor) -> Result<Tensor> {
    let (n, v) = rows_of("row_max", logits)?;
    on_cuda!(logits => crate::cuda::row_max(logits));
    let host = HostFloats::new("row_max", "logits", logits)?;
    let values = host.read();
    let mut max = vec![f32::NEG_INFINITY; n];
    let rows = rows_per_chunk(v);
    for_each_chunk(&mut max, rows, values.len(), |chunk, max| {
        for (i, max) in max.iter_mut().enumerate() {
            let values = &values[(chunk * rows + i) * v..][..v];
            *max = vectorised(
                #[inline(always)]
                || lanes::max(values, |x| x),
            );
        }
    });
    Tensor::from_vec(max, n, logits.device())
}

/// Per row: the sum of `exp(logit - max)` over the local columns, and the target's `logit - max` if it is local.
///
/// The local columns are the vocabulary `vocab_start .. vocab_start + v`; `targets` are ids of the whole vocabulary.
/// Row 1 of the result is 0 where the target is not local, so that summing the results of all shards completes both.
///
/// # Shapes
/// `logits (n, v)` f32 or bf16, `max (n)` f32, `targets (n)` u32 -> `(2, n)` f32, outside any graph.
///
/// # Errors
/// When the shapes do not fit or a tensor has another dtype or device.
pub fn sum_exp_and_target_logit(
    logits: &Tensor,
    max: &Tensor,
    targets: &Tensor,
    vocab_start: usize,
) -> Result<Tensor> {
    let op = "sum_exp_and_target_logit";
    let (n, v) = rows_of(op, logits)?;
    check_rows(op, n, &[("max", max), ("targets", targets)])?;
    on_cuda!(logits => crate::cuda::sum_exp_and_target_logit(logits, max, targets, vocab_start));
    let device = logits.device();
    let logits = HostFloats::new(op, "logits", logits)?;
    let max = HostF32::new(op, "max", max)?;
    let targets = HostU32::new(op, "targets", targets)?;
    let (logits, max, targets) = (logits.read(), max.read(), targets.read());
    let mut out = vec![0f32; 2 * n];
    let (sums, target_logits) = out.split_at_mut(n);
    let rows = rows_per_chunk(v);
    for_each_chunk2(
        (sums, rows),
        (target_logits, rows),
        logits.len(),
        |chunk, sums, hits| {
            for (i, (sum, hit)) in sums.iter_mut().zip(hits).enumerate() {
                let row = chunk * rows + i;
                let values = &logits[row * v..][..v];
                *sum = sum_exp(values, max[row]);
                if let Some(column) = local_column(targets[row], vocab_start, v) {
                    *hit = values[column] - max[row];
                }
            }
        },
    );
    Tensor::from_vec(out, (2, n), device)
}

/// The loss of each row, and its log-sum-exp, from what all shards of the vocabulary have together.
///
/// `max` is the largest of the shards' maxima, `sums` the sum of what [`sum_exp_and_target_logit`] returned for them.
/// The loss is 0 where the target is [`IGNORE_INDEX`], and NaN where it is beyond the vocabulary of `vocab_size` ids: an
/// error would have to wait for the GPU.
///
/// # Shapes
/// `max (n)`, `sums (2, n)` f32, `targets (n)` u32 -> `(n)` and `(n)` f32, outside any graph.
///
/// # Errors
/// When the shapes do not fit or a tensor has another dtype or device.
pub fn cross_entropy_loss(
    max: &Tensor,
    sums: &Tensor,
    targets: &Tensor,
    vocab_size: usize,
) -> Result<(Tensor, Tensor)> {
    let (loss, log_sum_exp) = losses(max, sums, targets, vocab_size)?;
    Ok((loss.into_tensor(), log_sum_exp))
}

/// [`cross_entropy_loss`], of which the loss may enter a graph.
pub(crate) fn losses(
    max: &Tensor,
    sums: &Tensor,
    targets: &Tensor,
    vocab_size: usize,
) -> Result<(OpOutput, Tensor)> {
    let op = "cross_entropy_loss";
    let n = targets.elem_count();
    check_rows(op, n, &[("max", max), ("targets", targets)])?;
    if sums.dims() != [2, n] {
        bail!("{op}: expected sums (2, {n}), got {:?}", sums.dims())
    }
    on_cuda!(sums => crate::cuda::cross_entropy_loss(max, sums, targets, vocab_size));
    let max = HostF32::new(op, "max", max)?;
    let sums = HostF32::new(op, "sums", sums)?;
    let targets = HostU32::new(op, "targets", targets)?;
    let (max, sums, targets) = (max.read(), sums.read(), targets.read());
    let (mut loss, mut log_sum_exp) = (vec![0f32; n], vec![0f32; n]);
    for (row, &target) in targets.iter().enumerate() {
        let log_sum = sums[row].ln();
        log_sum_exp[row] = max[row] + log_sum;
        if target != IGNORE_INDEX {
            let is_known = (target as usize) < vocab_size;
            loss[row] = if is_known {
                log_sum - sums[n + row]
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
    on_cuda!(logits => crate::cuda::cross_entropy_grad(logits, log_sum_exp, targets, vocab_start, grad));
    let grad = HostF32::new(op, "grad", grad)?;
    let grad = grad.read();
    let logits = HostFloats::new(op, "logits", logits)?;
    let (copy, shape) = (logits.read().into_owned(), logits.tensor().shape());
    let copy = OpOutput::rounded(copy, logits.dtype(), shape).into_tensor();
    rows_in_place(op, copy, (log_sum_exp, targets, vocab_start), |row| {
        grad[row]
    })
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
        crate::cuda::cross_entropy_grad_in_place(logits, log_sum_exp, targets, vocab_start, grad)
    });
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
    let log_sum_exp = HostF32::new(op, "log_sum_exp", log_sum_exp)?;
    let targets = HostU32::new(op, "targets", targets)?;
    let (log_sum_exp, targets) = (log_sum_exp.read(), targets.read());
    let rows = rows_per_chunk(v);
    in_place(op, "logits", logits, |logits| {
        if v == 0 {
            return;
        }
        for_each_chunk(logits, rows * v, n * v, |chunk, logits| {
            for (i, logits) in logits.chunks_exact_mut(v).enumerate() {
                let row = chunk * rows + i;
                if targets[row] == IGNORE_INDEX {
                    logits.fill(0.0);
                    continue;
                }
                let (log_sum_exp, grad) = (log_sum_exp[row], grad(row));
                vectorised(
                    #[inline(always)]
                    || {
                        for logit in logits.iter_mut() {
                            *logit = exp(*logit - log_sum_exp) * grad;
                        }
                    },
                );
                if let Some(column) = local_column(targets[row], vocab_start, v) {
                    logits[column] -= grad;
                }
            }
        });
    })
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

fn sum_exp(values: &[f32], max: f32) -> f32 {
    let mut total = 0f64;
    for block in values.chunks(BLOCK) {
        let sum = vectorised(
            #[inline(always)]
            || lanes::sum(block, |x| exp(x - max)),
        );
        total += f64::from(sum);
    }
    total as f32
}
