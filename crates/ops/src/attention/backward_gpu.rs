//! The backward pass of causal attention on the GPU: scores are computed again, once for the queries' gradient and once for
//! that of keys and values.

#![allow(unsafe_code)]

use super::forward_gpu::{Sizes, ranges_on_gpu, read_ranges};
#[cfg(feature = "cudnn")]
use super::rectangle::Mask;
use super::spec::{AttentionGrad, AttentionSpec, NAME};
use crate::cuda::element::{Element, by_dtype};
use crate::cuda::gpu::{BLOCK, Gpu};
use crate::cuda::launch;
use crate::cuda::pointer::{In, OptOut};
use crate::cuda::values::{Fresh, GpuValues};
use crate::host::values::detached;
use crate::settings::attention_code::AttentionCode;
use candle_core::{DType, Result, Tensor};

/// Gradients of q, k and v, in their shapes and dtype.
///
/// # Errors
/// When the shapes or dtypes do not fit, or a tensor is not on the same GPU.
pub(crate) fn attention_backward(
    pass: &AttentionGrad<'_>,
    spec: &AttentionSpec,
) -> Result<(Tensor, Tensor, Tensor)> {
    let (q, k, v) = (detached(pass.q)?, detached(pass.k)?, detached(pass.v)?);
    let (out, grad) = (detached(pass.output()?)?, detached(pass.grad)?);
    let log_sum_exp = detached(pass.log_sum_exp)?;
    let pass = AttentionGrad {
        q: &q,
        k: &k,
        v: &v,
        out: Some(&out),
        log_sum_exp: &log_sum_exp,
        grad: &grad,
    };
    #[cfg(feature = "cudnn")]
    if let Some(done) = backward_by_cudnn(&pass, spec)? {
        AttentionCode::Cudnn.note();
        return Ok(done.into());
    }
    AttentionCode::Own.note();
    by_dtype!(NAME, "q", q, T => {
        let gpu = Gpu::of(NAME, &q)?;
        let ranges = ranges_on_gpu(&q, spec)?;
        let pass = BackwardPass::new::<T>(&gpu, pass, (spec, &ranges))?;
        let out = gpu.read::<T>("the output", &out)?;
        let delta = pass.delta::<T>(&out)?;
        let dq = gpu.alloc::<T>(q.elem_count())?;
        let (dk, dv) = (gpu.alloc::<T>(k.elem_count())?, gpu.alloc::<T>(v.elem_count())?);
        pass.q_grad::<T>(delta.out().read(), (Some(dq.out()), None))?;
        pass.kv_grads::<T>(delta.out().read(), [Some(dk.out()), Some(dv.out())], [None, None])?;
        Ok((dq.into_tensor(q.shape()), dk.into_tensor(k.shape()), dv.into_tensor(v.shape())))
    })
}

#[cfg(feature = "cudnn")]
fn backward_by_cudnn(
    pass: &AttentionGrad<'_>,
    spec: &AttentionSpec,
) -> Result<Option<[Tensor; 3]>> {
    let rectangle = spec.rectangle().filter(|_| pass.q.dtype() != DType::F32);
    let Some(rectangle) = rectangle else {
        return super::cudnn::attention_backward(pass, spec, Mask::Causal);
    };
    let of_all = spec.of_all();
    rectangle.backward(pass, |pass| {
        super::cudnn::attention_backward(pass, &of_all, rectangle.mask)
    })
}

/// Adds gradients of q, k and v, in their shapes, to sums in f32.
///
/// # Errors
/// When the shapes or dtypes do not fit, or a tensor is not on the same GPU.
pub(crate) fn attention_backward_of_part(
    pass: &AttentionGrad<'_>,
    delta: Option<&Tensor>,
    spec: &AttentionSpec,
    sums: &[Tensor; 3],
) -> Result<()> {
    let (q, k, v) = (detached(pass.q)?, detached(pass.k)?, detached(pass.v)?);
    let (log_sum_exp, grad) = (detached(pass.log_sum_exp)?, detached(pass.grad)?);
    let pass = AttentionGrad {
        q: &q,
        k: &k,
        v: &v,
        out: pass.out,
        log_sum_exp: &log_sum_exp,
        grad: &grad,
    };
    // Its delta is that of the whole output, too, as that is what it reads.
    #[cfg(feature = "cudnn")]
    if let Some(out) = pass.out {
        let out = detached(&out.to_dtype(q.dtype())?)?;
        let pass = AttentionGrad {
            out: Some(&out),
            ..pass
        };
        if let Some(done) = backward_by_cudnn(&pass, spec)? {
            AttentionCode::Cudnn.note();
            let mut grads = sums.iter().zip(done);
            return grads.try_for_each(|(sum, grad)| {
                crate::elementwise::elements::add_into(sum, true, &grad)
            });
        }
    }
    let delta = match delta {
        Some(delta) => detached(delta)?,
        None => {
            crate::attention::causal::attention_delta(&pass.output()?.to_dtype(DType::F32)?, &grad)?
        }
    };
    let [dq, dk, dv] = sums;
    AttentionCode::Own.note();
    by_dtype!(NAME, "q", q, T => {
        let gpu = Gpu::of(NAME, &q)?;
        let ranges = ranges_on_gpu(&q, spec)?;
        let pass = BackwardPass::new::<T>(&gpu, pass, (spec, &ranges))?;
        let delta = gpu.read::<f32>("delta", &delta)?;
        let what = "a sum of gradients";
        gpu.write::<f32>(what, dq, |dq| pass.q_grad::<T>(delta.get(), (None, Some(dq))))?;
        gpu.write::<f32>(what, dk, |dk| gpu.write::<f32>(what, dv, |dv| {
            pass.kv_grads::<T>(delta.get(), [None, None], [Some(dk), Some(dv)])
        }))
    })
}

/// The tensors of [`AttentionGrad`], checked, of one dtype.
struct BackwardPass<'a> {
    gpu: &'a Gpu,
    sizes: Sizes<'a>,
    ranges: Option<GpuValues<'a>>,
    q: GpuValues<'a>,
    k: GpuValues<'a>,
    v: GpuValues<'a>,
    log_sum_exp: GpuValues<'a>,
    grad: GpuValues<'a>,
}

impl<'a> BackwardPass<'a> {
    fn new<T: Element>(
        gpu: &'a Gpu,
        pass: AttentionGrad<'a>,
        (spec, ranges): (&'a AttentionSpec, &'a Option<Tensor>),
    ) -> Result<Self> {
        Ok(Self {
            gpu,
            sizes: Sizes::new(gpu, pass.q, pass.k, spec)?,
            ranges: read_ranges(gpu, ranges)?,
            q: gpu.read::<T>("q", pass.q)?,
            k: gpu.read::<T>("k", pass.k)?,
            v: gpu.read::<T>("v", pass.v)?,
            log_sum_exp: gpu.read::<f32>("log_sum_exp", pass.log_sum_exp)?,
            grad: gpu.read::<T>("the gradient", pass.grad)?,
        })
    }

    /// The product of output and gradient, summed over each head: `(b, heads, t)`.
    fn delta<T: Element>(&self, out: &GpuValues<'_>) -> Result<Fresh<f32>> {
        let (gpu, rows) = (self.gpu, self.sizes.num_rows());
        let delta = gpu.alloc::<f32>(rows)?;
        let [t, _, heads, _, d] = self.sizes.counts(gpu)?;
        if rows > 0 {
            let launch = gpu.rows(rows.div_ceil(8), BLOCK, 0)?;
            let (out, grad) = (out.get::<T>(), self.grad.get());
            // SAFETY: out and grad have rows of d values, delta one for each row.
            unsafe {
                launch::attention_delta(&launch, delta.out(), out, grad, rows as i64, t, heads, d)
            }?;
        }
        Ok(delta)
    }

    /// Writes the gradient of the queries, or adds it to sums.
    fn q_grad<T: Element>(
        &self,
        delta: In<'_, f32>,
        (dq, sums): (OptOut<'_, T>, OptOut<'_, f32>),
    ) -> Result<()> {
        let (gpu, s) = (self.gpu, &self.sizes);
        let [t, keys, heads, kv_heads, d] = s.counts(gpu)?;
        let [group_size, group_offset, window] = s.seen(gpu)?;
        if s.num_rows() == 0 || d == 0 {
            return Ok(());
        }
        // SAFETY: the tensors have the sizes' shapes, `ranges` what all queries and tiles of keys of theirs need; block and shared memory are what the kernel asks for.
        unsafe {
            launch::attention_backward_q(
                &gpu.grid(s.blocks(s.t, s.heads), BLOCK, s.shared_bytes(4, 1))?,
                dq,
                sums,
                self.q.get::<T>(),
                self.k.get(),
                self.v.get(),
                self.grad.get(),
                self.log_sum_exp.get(),
                delta,
                self.ranges.as_ref().map(GpuValues::get),
                t,
                keys,
                heads,
                kv_heads,
                d,
                group_size,
                group_offset,
                window,
                s.spec.scale,
            )
        }
    }

    /// Of keys and values; zeros for heads that no query reads.
    fn kv_grads<T: Element>(
        &self,
        delta: In<'_, f32>,
        [dk, dv]: [OptOut<'_, T>; 2],
        [k_sums, v_sums]: [OptOut<'_, f32>; 2],
    ) -> Result<()> {
        let (gpu, s) = (self.gpu, &self.sizes);
        let [t, keys, heads, kv_heads, d] = s.counts(gpu)?;
        let [group_size, group_offset, window] = s.seen(gpu)?;
        if s.b * s.keys * s.kv_heads == 0 || d == 0 {
            return Ok(());
        }
        // SAFETY: the tensors have the sizes' shapes, `ranges` what all queries and tiles of keys of theirs need; block and shared memory are what the kernel asks for.
        unsafe {
            launch::attention_backward_kv(
                &gpu.grid(s.blocks(s.keys, s.kv_heads), BLOCK, s.shared_bytes(4, 2))?,
                dk,
                dv,
                k_sums,
                v_sums,
                self.q.get::<T>(),
                self.k.get(),
                self.v.get(),
                self.grad.get(),
                self.log_sum_exp.get(),
                delta,
                self.ranges.as_ref().map(GpuValues::get),
                t,
                keys,
                heads,
                kv_heads,
                d,
                group_size,
                group_offset,
                window,
                s.spec.scale,
            )
        }
    }
}
