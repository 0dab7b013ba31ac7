//! Cross-entropy over a slice of the vocabulary on the GPU; the equations are those of the crate's `vocab_shard`,
//! which checks the shapes.

use super::element::{Element, by_dtype};
use super::gpu::{BLOCK, Gpu};
use super::launch;
use super::pointer::{In, OptIn, Out};
use super::values::Values;
use crate::OpOutput;
use crate::host::detached;
use candle_core::{Result, Tensor};

/// Threads of a block that passes over a row of logits, which may be as long as the vocabulary.
const WIDE_BLOCK: u32 = 1024;

/// The largest logit of each row.
pub(crate) fn row_max(logits: &Tensor) -> Result<Tensor> {
    by_dtype!("row_max", "logits", logits, T => row_max_as::<T>(&detached(logits)?))
}

fn row_max_as<T: Element>(logits: &Tensor) -> Result<Tensor> {
    let gpu = Gpu::of("row_max", logits)?;
    let (n, v) = logits.dims2()?;
    let values = gpu.read::<T>("logits", logits)?;
    let max = gpu.alloc::<f32>(n)?;
    if n > 0 {
        let launch = gpu.rows(n, block(v), 128)?;
        // SAFETY: logits has n * v values and max n.
        unsafe { launch::row_max(&launch, max.out(), values.get::<T>(), n as i64, v as i64) }?;
    }
    Ok(max.into_tensor(n))
}

/// For each row the sum of `exp(logit - max)`, and the target's `logit - max` if this slice has it, else 0.
pub(crate) fn sum_exp_and_target_logit(
    logits: &Tensor,
    max: &Tensor,
    targets: &Tensor,
    vocab_start: usize,
) -> Result<Tensor> {
    let (max, targets) = (detached(max)?, detached(targets)?);
    by_dtype!("sum_exp_and_target_logit", "logits", logits, T => {
        sums::<T>(&detached(logits)?, &max, &targets, vocab_start)
    })
}

fn sums<T: Element>(
    logits: &Tensor,
    max: &Tensor,
    targets: &Tensor,
    vocab_start: usize,
) -> Result<Tensor> {
    let gpu = Gpu::of("sum_exp_and_target_logit", logits)?;
    let (n, v) = logits.dims2()?;
    let values = gpu.read::<T>("logits", logits)?;
    let (max, targets) = (
        gpu.read::<f32>("max", max)?,
        gpu.read::<u32>("targets", targets)?,
    );
    let out = gpu.alloc::<f32>(2 * n)?;
    if n > 0 {
        // SAFETY: logits has n * v values, max and targets n, out 2 n.
        unsafe {
            launch::sum_exp_and_target_logit(
                &gpu.rows(n, block(v), 128)?,
                out.out(),
                values.get::<T>(),
                max.get(),
                targets.get(),
                n as i64,
                v as i64,
                vocab_start as i64,
            )
        }?;
    }
    Ok(out.into_tensor((2, n)))
}

/// The loss of each row and its log-sum-exp.
pub(crate) fn cross_entropy_loss(
    max: &Tensor,
    sums: &Tensor,
    targets: &Tensor,
    vocab: usize,
) -> Result<(OpOutput, Tensor)> {
    let gpu = Gpu::of("cross_entropy_loss", sums)?;
    let n = targets.elem_count();
    let (max, sums, targets) = (detached(max)?, detached(sums)?, detached(targets)?);
    let max = gpu.read::<f32>("max", &max)?;
    let sums = gpu.read::<f32>("sums", &sums)?;
    let targets = gpu.read::<u32>("targets", &targets)?;
    let (loss, log_sum_exp) = (gpu.alloc::<f32>(n)?, gpu.alloc::<f32>(n)?);
    if n > 0 {
        // SAFETY: sums has 2 n values, the others n.
        unsafe {
            launch::cross_entropy_loss(
                &gpu.elements(n)?,
                loss.out(),
                log_sum_exp.out(),
                max.get(),
                sums.get(),
                targets.get(),
                n as i64,
                vocab as i64,
            )
        }?;
    }
    Ok((loss.into_output(n), log_sum_exp.into_tensor(n)))
}

/// Gradient of a row's loss.
#[derive(Clone, Copy)]
pub(crate) enum LossGrad<'a> {
    /// The same for all rows.
    Same(f32),
    /// One for each row: `(n)` f32.
    PerRow(&'a Tensor),
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
    let grad = LossGrad::PerRow(&grad);
    let rows = Rows::new(&gpu, &logits, (&log_sum_exp, &targets, vocab_start), grad)?;
    by_dtype!(gpu.op(), "logits", logits, T => {
        let dlogits = gpu.alloc::<T>(logits.elem_count())?;
        let values = gpu.read::<T>("logits", &logits)?;
        // SAFETY: logits and its gradient have as many values as the rows.
        unsafe { rows.backward::<T>(dlogits.out(), values.get()) }?;
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
    let grad = LossGrad::Same(grad);
    let rows = Rows::new(&gpu, &logits, (&log_sum_exp, &targets, vocab_start), grad)?;
    by_dtype!(gpu.op(), "logits", logits, T => {
        gpu.write::<T>("logits", &logits, |values| {
            // SAFETY: values are the rows' logits; the kernel lets its output be its input.
            unsafe { rows.backward::<T>(values, values.read()) }
        })?;
    });
    Ok(logits)
}

/// What the backward pass needs to know of the rows.
struct Rows<'a> {
    gpu: &'a Gpu,
    sizes: (usize, usize),
    log_sum_exp: Values<'a>,
    targets: Values<'a>,
    row_grads: Option<Values<'a>>,
    grad: f32,
    vocab_start: usize,
}

impl<'a> Rows<'a> {
    fn new(
        gpu: &'a Gpu,
        logits: &Tensor,
        (log_sum_exp, targets, vocab_start): (&'a Tensor, &'a Tensor, usize),
        grad: LossGrad<'a>,
    ) -> Result<Self> {
        let sizes = logits.dims2()?;
        let (row_grads, grad) = match grad {
            LossGrad::Same(grad) => (None, grad),
            LossGrad::PerRow(grads) => (Some(gpu.read::<f32>("grad", grads)?), 0.0),
        };
        Ok(Self {
            gpu,
            sizes,
            log_sum_exp: gpu.read::<f32>("log_sum_exp", log_sum_exp)?,
            targets: gpu.read::<u32>("targets", targets)?,
            row_grads,
            grad,
            vocab_start,
        })
    }

    /// # Safety
    /// Both pointers must have as many values as the sizes say.
    unsafe fn backward<T: Element>(&self, dlogits: Out<T>, logits: In<T>) -> Result<()> {
        let (n, v) = self.sizes;
        if n * v == 0 {
            return Ok(());
        }
        let row_grads: OptIn<f32> = self.row_grads.as_ref().map(|grads| grads.get());
        // SAFETY: the caller's promise, and n values in each of the others.
        unsafe {
            launch::cross_entropy_backward(
                &self.gpu.rows(n, block(v), 0)?,
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
