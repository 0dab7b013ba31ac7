//! The backward pass of causal attention on the GPU: scores are computed again, once for the queries' gradient and once for
//! that of keys and values.

use super::attention::{Sizes, read_starts, starts_on_gpu};
use super::element::{Element, by_dtype};
use super::gpu::{BLOCK, Gpu};
use super::launch;
use super::values::{Fresh, Values};
use crate::attention_spec::NAME;
use crate::host::detached;
use crate::{AttentionCode, AttentionGrad, AttentionSpec};
use candle_core::{Result, Tensor};

/// Gradients of q, k and v, in their shapes and dtype.
///
/// # Errors
/// When the shapes or dtypes do not fit, or a tensor is not on the same GPU.
pub(crate) fn attention_backward(
    pass: &AttentionGrad<'_>,
    spec: &AttentionSpec,
) -> Result<(Tensor, Tensor, Tensor)> {
    let (q, k, v) = (detached(pass.q)?, detached(pass.k)?, detached(pass.v)?);
    let (out, grad) = (detached(pass.out)?, detached(pass.grad)?);
    let log_sum_exp = detached(pass.log_sum_exp)?;
    let pass = AttentionGrad {
        q: &q,
        k: &k,
        v: &v,
        out: &out,
        log_sum_exp: &log_sum_exp,
        grad: &grad,
    };
    #[cfg(feature = "cudnn")]
    if let Some(done) = super::cudnn::attention_backward(&pass, spec)? {
        AttentionCode::Cudnn.note();
        return Ok(done);
    }
    AttentionCode::Own.note();
    by_dtype!(NAME, "q", q, T => {
        let gpu = Gpu::of(NAME, &q)?;
        let starts = starts_on_gpu(&q, spec)?;
        let pass = BackwardPass::new::<T>(&gpu, pass, (spec, &starts))?;
        let delta = pass.delta::<T>()?;
        let dq = pass.q_grad::<T>(&delta)?.into_tensor(q.shape());
        let (dk, dv) = pass.kv_grads::<T>(&delta)?;
        Ok((dq, dk.into_tensor(k.shape()), dv.into_tensor(v.shape())))
    })
}

/// The tensors of [`AttentionGrad`], checked, of one dtype.
struct BackwardPass<'a> {
    gpu: &'a Gpu,
    sizes: Sizes<'a>,
    starts: Option<Values<'a>>,
    q: Values<'a>,
    k: Values<'a>,
    v: Values<'a>,
    out: Values<'a>,
    log_sum_exp: Values<'a>,
    grad: Values<'a>,
}

impl<'a> BackwardPass<'a> {
    fn new<T: Element>(
        gpu: &'a Gpu,
        pass: AttentionGrad<'a>,
        (spec, starts): (&'a AttentionSpec, &'a Option<Tensor>),
    ) -> Result<Self> {
        let AttentionGrad {
            q,
            k,
            v,
            out,
            log_sum_exp,
            grad,
        } = pass;
        let sizes = Sizes::new(gpu, q, k, spec)?;
        Ok(Self {
            gpu,
            sizes,
            starts: read_starts(gpu, starts)?,
            q: gpu.read::<T>("q", q)?,
            k: gpu.read::<T>("k", k)?,
            v: gpu.read::<T>("v", v)?,
            out: gpu.read::<T>("the output", out)?,
            log_sum_exp: gpu.read::<f32>("log_sum_exp", log_sum_exp)?,
            grad: gpu.read::<T>("the gradient", grad)?,
        })
    }

    /// The product of output and gradient, summed over each head: `(b, heads, t)`.
    fn delta<T: Element>(&self) -> Result<Fresh<f32>> {
        let (gpu, rows) = (self.gpu, self.sizes.num_rows());
        let delta = gpu.alloc::<f32>(rows)?;
        let [t, heads, _, d] = self.sizes.counts(gpu)?;
        if rows > 0 {
            let launch = gpu.rows(rows.div_ceil(8), BLOCK, 0)?;
            let (out, grad) = (self.out.get::<T>(), self.grad.get());
            // SAFETY: out and grad have rows of d values, delta one for each row.
            unsafe {
                launch::attention_delta(&launch, delta.out(), out, grad, rows as i64, t, heads, d)
            }?;
        }
        Ok(delta)
    }

    fn q_grad<T: Element>(&self, delta: &Fresh<f32>) -> Result<Fresh<T>> {
        let (gpu, s) = (self.gpu, &self.sizes);
        let [t, heads, kv_heads, d] = s.counts(gpu)?;
        let [group_size, group_offset, window] = s.seen(gpu)?;
        let num_rows = s.num_rows();
        let dq = gpu.alloc::<T>(num_rows * d as usize)?;
        if num_rows > 0 && d > 0 {
            // SAFETY: the tensors have the sizes' shapes; block and shared memory are what the kernel asks for.
            unsafe {
                launch::attention_backward_q(
                    &gpu.grid(s.blocks(s.heads), BLOCK, s.shared_bytes(4, 1))?,
                    dq.out(),
                    self.q.get::<T>(),
                    self.k.get(),
                    self.v.get(),
                    self.grad.get(),
                    self.log_sum_exp.get(),
                    delta.out().read(),
                    self.starts.as_ref().map(Values::get),
                    t,
                    heads,
                    kv_heads,
                    d,
                    group_size,
                    group_offset,
                    window,
                    s.spec.scale,
                )
            }?;
        }
        Ok(dq)
    }

    /// Of keys and values; zeros for heads that no query reads.
    fn kv_grads<T: Element>(&self, delta: &Fresh<f32>) -> Result<(Fresh<T>, Fresh<T>)> {
        let (gpu, s) = (self.gpu, &self.sizes);
        let [t, heads, kv_heads, d] = s.counts(gpu)?;
        let [group_size, group_offset, window] = s.seen(gpu)?;
        let len = s.b * s.t * s.kv_heads * d as usize;
        let (dk, dv) = (gpu.alloc::<T>(len)?, gpu.alloc::<T>(len)?);
        if len > 0 {
            // SAFETY: the tensors have the sizes' shapes; block and shared memory are what the kernel asks for.
            unsafe {
                launch::attention_backward_kv(
                    &gpu.grid(s.blocks(s.kv_heads), BLOCK, s.shared_bytes(4, 2))?,
                    dk.out(),
                    dv.out(),
                    self.q.get::<T>(),
                    self.k.get(),
                    self.v.get(),
                    self.grad.get(),
                    self.log_sum_exp.get(),
                    delta.out().read(),
                    self.starts.as_ref().map(Values::get),
                    t,
                    heads,
                    kv_heads,
                    d,
                    group_size,
                    group_offset,
                    window,
                    s.spec.scale,
                )
            }?;
        }
        Ok((dk, dv))
    }
}
