//! Root-mean-square normalisation: `y = x / sqrt(mean(x^2) + eps) * w` (Zhang and Sennrich 2019, arXiv:1910.07467).

#[cfg(feature = "cuda")]
use crate::cuda::Norm;
use crate::dispatch::on_cuda;
use crate::element::{Element, by_float};
use crate::host_floats::{HostFloats, one_dtype};
use crate::lanes::dot;
use crate::row_norm::{self, Row};
use crate::{OpOutput, with_backward2};
use candle_core::{Result, Tensor};

const NAME: &str = "rms_norm";

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
    let y = forward(xs, weight, eps)?;
    let (x, w) = (xs.detach(), weight.detach());
    let (x_tracked, w_tracked) = (xs.track_op(), weight.track_op());
    with_backward2(xs, weight, y, NAME, move |dy| {
        let (dx, dw) = rms_norm_backward(&x, &w, dy, eps, None, w_tracked)?;
        // candle adds gradients in the dtype of what they belong to.
        let dw = dw.map(|dw| dw.to_dtype(w.dtype()));
        Ok((x_tracked.then_some(dx), dw.transpose()?))
    })
}

/// [`rms_norm`] outside any graph.
///
/// # Shapes
/// `xs (.., h)`, `weight (h)` -> `(.., h)`; one dtype.
///
/// # Errors
/// When `weight` is not as long as the last dimension of `xs`, or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn rms_norm_forward(xs: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    Ok(forward(xs, weight, eps)?.into_tensor())
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
    let h = row_norm::backward_width(NAME, xs, weight, dy, residual)?;
    on_cuda!(xs => {
        let (inputs, wanted) = ([xs, weight, dy], [weight_grad, false]);
        let (dx, [dw, _]) = crate::cuda::norm_backward(Norm::Rms, inputs, eps, residual, wanted)?;
        Ok((dx, dw))
    });
    let inputs = row_norm::Backward::new(NAME, xs, weight, dy, residual)?;
    let _timer = crate::op_timer::op("rms_norm_backward");
    let (dx, dw) = by_float!(inputs.dtype(), T => inputs.run::<T>(
        h,
        weight_grad.into(),
        #[inline(always)]
        |row, dx, dw| backward_row(row, eps, dx, dw),
    ));
    let dw = weight_grad.then(|| Tensor::from_vec(dw, h, xs.device()));
    Ok((dx, dw.transpose()?))
}

/// `1 / sqrt(mean(x^2) + eps)` of one row.
#[inline(always)]
fn inverse_rms<T: Element>(x: &[T], eps: f64) -> f32 {
    (1.0 / (dot(x, x) as f64 / x.len() as f64 + eps).sqrt()) as f32
}

fn forward(xs: &Tensor, weight: &Tensor, eps: f64) -> Result<OpOutput> {
    let h = row_norm::width(NAME, xs, weight)?;
    on_cuda!(xs => crate::cuda::norm_forward(Norm::Rms, xs, weight, None, eps));
    let _timer = crate::op_timer::op("rms_norm_forward");
    let x = HostFloats::new(NAME, "xs", xs)?;
    let w = HostFloats::new(NAME, "weight", weight)?;
    one_dtype(NAME, &[("xs", &x), ("weight", &w)])?;
    Ok(by_float!(x.dtype(), T => {
        let w = w.read_as::<T>();
        let y = row_norm::forward(
            &x.read_as::<T>(),
            h,
            #[inline(always)]
            |x, y, _| forward_row(x, &w, eps, y),
        );
        OpOutput::of(y, xs.shape())
    }))
}

#[inline(always)]
fn forward_row<T: Element>(x: &[T], w: &[T], eps: f64, y: &mut [T]) {
    let r = inverse_rms(x, eps);
    for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
        *y = T::nearest(x.widen() * r * w.widen());
    }
}

/// With `n = x r` and `g = dy w`: `dx = r (g - n mean(g n))`, `dw = sum over rows of dy n`; `dw` is empty if it is not
/// wanted.
#[inline(always)]
fn backward_row<T: Element>(row: Row<'_, T>, eps: f64, dx: &mut [T], dw: &mut [f32]) {
    let Row {
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
