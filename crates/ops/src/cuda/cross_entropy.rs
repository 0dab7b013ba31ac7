//! Cross-entropy over a slice of the vocabulary on the GPU; the equations are those of the crate's `vocab_shard`.

use super::launch;
use super::pointer::{In, OptIn, Out};
use super::values::{BLOCK, Element, Gpu, Values, by_dtype, dims_must_be};
use candle_core::{Result, Tensor};

/// Threads of a block that passes over a row of logits, which may be as long as the vocabulary.
const WIDE_BLOCK: u32 = 1024;

/// The largest logit of each row, negative infinity for rows of none.
///
/// # Shapes
/// `logits (n, v)` f32 or bf16 -> `(n)` f32.
///
/// # Errors
/// When `logits` has another rank or dtype, or is not on CUDA.
pub fn row_max(logits: &Tensor) -> Result<Tensor> {
    let logits = logits.contiguous()?;
    by_dtype!("row_max", logits.dtype(), T => row_max_as::<T>(&logits))
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

/// For each row the sum of `exp(logit - max)`, and the target's logit if this slice has it, else 0.
///
/// # Shapes
/// `logits (n, v)` f32 or bf16, `max (n)` f32, `targets (n)` u32 -> `(2, n)` f32.
///
/// # Errors
/// When the shapes or dtypes do not fit, or a tensor is not on the same GPU.
pub fn sum_exp_and_target_logit(
    logits: &Tensor,
    max: &Tensor,
    targets: &Tensor,
    vocab_start: usize,
) -> Result<Tensor> {
    let logits = logits.contiguous()?;
    by_dtype!("sum_exp_and_target_logit", logits.dtype(), T => sums::<T>(&logits, max, targets, vocab_start))
}

fn sums<T: Element>(
    logits: &Tensor,
    max: &Tensor,
    targets: &Tensor,
    vocab_start: usize,
) -> Result<Tensor> {
    let op = "sum_exp_and_target_logit";
    let gpu = Gpu::of(op, logits)?;
    let (n, v) = logits.dims2()?;
    dims_must_be(op, "max", max, &[n])?;
    dims_must_be(op, "targets", targets, &[n])?;
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

/// Gradient of a row's loss.
#[derive(Clone, Copy, Debug)]
pub enum LossGrad<'a> {
    /// The same for all rows.
    Same(f32),
    /// One for each row: `(n)` f32.
    PerRow(&'a Tensor),
}

/// Gradient of the logits, `grad (softmax - one-hot target)`; rows whose target is `IGNORE_INDEX` get zeros.
///
/// # Shapes
/// `logits (n, v)` f32 or bf16, `log_sum_exp (n)` f32, `targets (n)` u32 -> `(n, v)` in the dtype of `logits`.
///
/// # Errors
/// When the shapes or dtypes do not fit, or a tensor is not on the same GPU.
pub fn cross_entropy_grad(
    logits: &Tensor,
    log_sum_exp: &Tensor,
    targets: &Tensor,
    vocab_start: usize,
    grad: LossGrad,
) -> Result<Tensor> {
    let logits = logits.contiguous()?;
    by_dtype!("cross_entropy_grad", logits.dtype(), T => {
        let gpu = Gpu::of("cross_entropy_grad", &logits)?;
        let dlogits = gpu.alloc::<T>(logits.elem_count())?;
        let values = gpu.read::<T>("logits", &logits)?;
        let rows = Rows::new(&gpu, logits.dims2()?, log_sum_exp, targets, vocab_start, grad)?;
        // SAFETY: logits and its gradient have as many values as the rows.
        unsafe { rows.backward::<T>(dlogits.out(), values.get()) }?;
        drop(values);
        Ok(dlogits.into_tensor(logits.shape()))
    })
}

/// [`cross_entropy_grad`] that overwrites the logits with their gradient, so that only one of the two exists.
///
/// # Errors
/// When the shapes or dtypes do not fit, or a tensor is not contiguous or not on the same GPU.
pub fn cross_entropy_grad_in_place(
    logits: Tensor,
    log_sum_exp: &Tensor,
    targets: &Tensor,
    vocab_start: usize,
    grad: LossGrad,
) -> Result<Tensor> {
    let logits = logits.detach().contiguous()?;
    by_dtype!("cross_entropy_grad_in_place", logits.dtype(), T => {
        let gpu = Gpu::of("cross_entropy_grad_in_place", &logits)?;
        let rows = Rows::new(&gpu, logits.dims2()?, log_sum_exp, targets, vocab_start, grad)?;
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
        sizes: (usize, usize),
        log_sum_exp: &'a Tensor,
        targets: &'a Tensor,
        vocab_start: usize,
        grad: LossGrad<'a>,
    ) -> Result<Self> {
        let op = "cross_entropy_grad";
        dims_must_be(op, "log_sum_exp", log_sum_exp, &[sizes.0])?;
        dims_must_be(op, "targets", targets, &[sizes.0])?;
        let (row_grads, grad) = match grad {
            LossGrad::Same(grad) => (None, grad),
            LossGrad::PerRow(grads) => {
                dims_must_be(op, "grad", grads, &[sizes.0])?;
                (Some(gpu.read::<f32>("grad", grads)?), 0.0)
            }
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
