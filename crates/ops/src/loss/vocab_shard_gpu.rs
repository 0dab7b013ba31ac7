//! Cross-entropy over a slice of the vocabulary on the GPU.

#![allow(unsafe_code)]

use crate::cuda::element::{Element, by_dtype};
use crate::cuda::gpu::{BLOCK, Gpu};
use crate::cuda::launch;
use crate::cuda::pointer::{In, OptIn, Out};
use crate::cuda::values::GpuValues;
use crate::host::op_output::OpOutput;
use crate::host::values::detached;
use candle_core::{Result, Tensor};

/// Threads of a block that passes over a row of logits, which may be as long as the vocabulary.
const WIDE_BLOCK: u32 = 1024;

/// For each row the largest logit, the sum of `exp(logit - largest)`, and the target's logit if this slice has it, else 0.
pub(crate) fn softmax_stats(
    logits: &Tensor,
    targets: &Tensor,
    vocab_start: usize,
) -> Result<Tensor> {
    let gpu = Gpu::of("softmax_stats", logits)?;
    let (n, v) = logits.dims2()?;
    let (logits, targets) = (detached(logits)?, detached(targets)?);
    let targets = gpu.read::<u32>("targets", &targets)?;
    let stats = gpu.alloc::<f32>(3 * n)?;
    let at = gpu.rows(n, block(v), 128)?;
    let (rows, cols, start) = (n as i64, v as i64, vocab_start as i64);
    by_dtype!(gpu.op(), "logits", logits, T => if n > 0 {
        let values = gpu.read::<T>("logits", &logits)?;
        let (out, values, targets) = (stats.out(), values.get::<T>(), targets.get());
        // SAFETY: logits has n * v values, targets n, stats 3 n.
        unsafe { launch::softmax_stats(&at, out, values, targets, rows, cols, start) }?;
    });
    Ok(stats.into_tensor((n, 3)))
}

/// The loss of each row and its log-sum-exp.
pub(crate) fn cross_entropy_loss(
    stats: &Tensor,
    targets: &Tensor,
    vocab: usize,
) -> Result<(OpOutput, Tensor)> {
    let gpu = Gpu::of("cross_entropy_loss", stats)?;
    let n = targets.elem_count();
    let shards = stats.elem_count() / (3 * n).max(1);
    let (stats, targets) = (detached(stats)?, detached(targets)?);
    let stats = gpu.read::<f32>("stats", &stats)?;
    let targets = gpu.read::<u32>("targets", &targets)?;
    let (loss, log_sum_exp) = (gpu.alloc::<f32>(n)?, gpu.alloc::<f32>(n)?);
    if n > 0 {
        // SAFETY: stats has 3 n values of each shard, the others n.
        unsafe {
            launch::cross_entropy_loss(
                &gpu.elements(n)?,
                loss.out(),
                log_sum_exp.out(),
                stats.get(),
                targets.get(),
                n as i64,
                shards as i64,
                vocab as i64,
            )
        }?;
    }
    Ok((loss.into_output(n), log_sum_exp.into_tensor(n)))
}

/// Gradient of the logits, in their dtype.
pub(crate) fn cross_entropy_grad(
    logits: &Tensor,
    log_sum_exp: &Tensor,
    targets: &Tensor,
    vocab_start: usize,
    grad: &Tensor,
) -> Result<Tensor> {
    let gpu = Gpu::of("cross_entropy_grad", logits)?;
    let logits = detached(logits)?;
    let rows = [log_sum_exp, targets, grad].map(detached);
    let [log_sum_exp, targets, grad] = rows;
    let (log_sum_exp, targets, grad) = (log_sum_exp?, targets?, grad?);
    let rows = Rows {
        sizes: logits.dims2()?,
        log_sum_exp: gpu.read::<f32>("log_sum_exp", &log_sum_exp)?,
        targets: gpu.read::<u32>("targets", &targets)?,
        row_grads: Some(gpu.read::<f32>("grad", &grad)?),
        grad: 0.0,
        vocab_start,
    };
    by_dtype!(gpu.op(), "logits", logits, T => {
        let dlogits = gpu.alloc::<T>(logits.elem_count())?;
        let values = gpu.read::<T>("logits", &logits)?;
        // SAFETY: logits and its gradient have as many values as the rows.
        unsafe { rows.backward::<T>(&gpu, dlogits.out(), values.get()) }?;
        drop(values);
        Ok(dlogits.into_tensor(logits.shape()))
    })
}

/// Overwrites the logits with their gradient, so that only one of the two exists.
pub(crate) fn cross_entropy_grad_in_place(
    logits: Tensor,
    log_sum_exp: &Tensor,
    targets: &Tensor,
    vocab_start: usize,
    grad: f32,
) -> Result<Tensor> {
    let gpu = Gpu::of("cross_entropy_grad_in_place", &logits)?;
    let logits = detached(&logits)?;
    let (log_sum_exp, targets) = (detached(log_sum_exp)?, detached(targets)?);
    let rows = Rows {
        sizes: logits.dims2()?,
        log_sum_exp: gpu.read::<f32>("log_sum_exp", &log_sum_exp)?,
        targets: gpu.read::<u32>("targets", &targets)?,
        row_grads: None,
        grad,
        vocab_start,
    };
    by_dtype!(gpu.op(), "logits", logits, T => {
        gpu.write::<T>("logits", &logits, |values| {
            // SAFETY: values are the rows' logits; the kernel lets its output be its input.
            unsafe { rows.backward::<T>(&gpu, values, values.read()) }
        })?;
    });
    Ok(logits)
}

/// What the backward pass needs to know of the rows.
struct Rows<'a> {
    sizes: (usize, usize),
    log_sum_exp: GpuValues<'a>,
    targets: GpuValues<'a>,
    /// Gradients of the rows' losses; without them all have `grad`.
    row_grads: Option<GpuValues<'a>>,
    grad: f32,
    vocab_start: usize,
}

impl Rows<'_> {
    /// # Safety
    /// Both pointers must have as many values as the sizes say.
    unsafe fn backward<T: Element>(&self, gpu: &Gpu, dlogits: Out<T>, logits: In<T>) -> Result<()> {
        let (n, v) = self.sizes;
        if n * v == 0 {
            return Ok(());
        }
        let row_grads: OptIn<f32> = self.row_grads.as_ref().map(|grads| grads.get());
        // SAFETY: the caller's promise, and n values in each of the others.
        unsafe {
            launch::cross_entropy_backward(
                &gpu.rows(n, block(v), 0)?,
                dlogits,
                logits,
                self.log_sum_exp.get(),
                self.targets.get(),
                row_grads,
                self.grad,
                n as i64,
                v as i64,
                self.vocab_start as i64,
            )
        }
    }
}

fn block(cols: usize) -> u32 {
    if cols >= 8192 { WIDE_BLOCK } else { BLOCK }
}
