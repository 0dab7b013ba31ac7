//! Root-mean-square normalisation: `y = x / sqrt(mean(x^2) + eps) * w` (Zhang and Sennrich 2019, arXiv:1910.07467).

use super::row_norm;
use super::row_norm::{GradRow, InputRow, RowNorm};
use crate::cpu::element::Element;
use crate::cpu::lanes::dot;
use candle_core::{Result, Tensor};

/// Normalises each row of `xs` by its root mean square and scales it by `weight`, as Hugging Face's Llama does.
///
/// The gradient of `weight` is computed only if `weight` is tracked. Relative error against f64 about 6e-8, that of the
/// gradient of `weight` 1e-7: see `docs/accuracy.md`.
///
/// # Shapes
/// `xs (.., h)`, `weight (h)` -> `(.., h)`; one dtype.
///
/// # Errors
/// When `weight` is not as long as the last dimension of `xs`, or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn rms_norm(xs: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    row_norm::in_graph::<RmsNorm>(xs, weight, None, eps)
}

/// [`rms_norm`] outside any graph.
///
/// # Shapes
/// `xs (.., h)`, `weight (h)` -> `(.., h)`; one dtype.
///
/// # Errors
/// When `weight` is not as long as the last dimension of `xs`, or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn rms_norm_forward(xs: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    Ok(row_norm::forward::<RmsNorm>(xs, weight, None, eps)?.into_tensor())
}

/// Gradient of `xs`, plus `residual` if there is one, and that of `weight` if `weight_grad`; outside any graph.
///
/// `residual` is the gradient that reaches `xs` along the path around the norm; it is added in the same pass.
///
/// # Shapes
/// `xs`, `dy` and `residual` `(.., h)`, `weight (h)`, of one dtype -> `(.., h)` in that dtype, and `(h)` in f32.
///
/// # Errors
/// When the shapes do not fit or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn rms_norm_backward(
    xs: &Tensor,
    weight: &Tensor,
    dy: &Tensor,
    eps: f64,
    residual: Option<&Tensor>,
    weight_grad: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let wanted = [weight_grad, false];
    let (dx, [dw, _]) = row_norm::backward::<RmsNorm>([xs, weight, dy], eps, residual, wanted)?;
    Ok((dx, dw))
}

/// `1 / sqrt(mean(x^2) + eps)` of one row.
#[inline(always)]
fn inverse_rms<T: Element>(x: &[T], eps: f64) -> f32 {
    (1.0 / (dot(x, x) as f64 / x.len() as f64 + eps).sqrt()) as f32
}

struct RmsNorm;

impl RowNorm for RmsNorm {
    const NAME: &'static str = "rms_norm";
    const FORWARD: &'static str = "rms_norm_forward";
    const BACKWARD: &'static str = "rms_norm_backward";
    #[cfg(feature = "cuda")]
    const ON_GPU: super::row_norm_gpu::Norm = super::row_norm_gpu::Norm::Rms;

    #[inline(always)]
    fn forward_row<T: Element>(InputRow { x, w, .. }: InputRow<'_, T>, eps: f64, y: &mut [T]) {
        let r = inverse_rms(x, eps);
        for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
            *y = T::nearest(x.widen() * r * w.widen());
        }
    }

    /// With `n = x r` and `g = dy w`: `dx = r (g - n mean(g n))`, `dw = sum over rows of dy n`.
    #[inline(always)]
    fn backward_row<T: Element>(
        row: GradRow<'_, T>,
        eps: f64,
        dx: &mut [T],
        [dw, _]: [&mut [f32]; 2],
    ) {
        let GradRow {
            x,
            w,
            dy,
            residual,
            scratch: [g, _],
        } = row;
        let r = inverse_rms(x, eps);
        for ((g, dy), w) in g.iter_mut().zip(dy).zip(w) {
            *g = dy.widen() * w.widen();
        }
        let along_x = r * r * dot(g, x) / x.len() as f32;
        row_norm::finish_dx(
            dx,
            (g, x),
            residual,
            #[inline(always)]
            |g, x| r * (g - x * along_x),
        );
        for ((dw, dy), x) in dw.iter_mut().zip(dy).zip(x) {
            *dw += dy.widen() * x.widen() * r;
        }
    }
}
