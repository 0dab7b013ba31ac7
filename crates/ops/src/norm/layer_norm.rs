//! Layer normalisation: `y = (x - mean(x)) / sqrt(var(x) + eps) * w + b` (Ba, Kiros and Hinton 2016, arXiv:1607.06450).

use super::row_norm;
use super::row_norm::{GradRow, InputRow, RowNorm};
use crate::cpu::element::Element;
use crate::cpu::lanes::{dot, sum};
use candle_core::{Result, Tensor};

/// Takes from each row of `xs` its mean, divides it by its standard deviation, and scales it by `weight`; adds `bias`.
///
/// The variance is that of the population: the mean of the squares, not `h / (h - 1)` times it. The gradients of `weight`
/// and `bias` are computed only if they are tracked. Relative error against f64 about 6e-8, that of the gradients of `weight`
/// and `bias` 1e-7, and a mean far from zero costs none of it: see `docs/accuracy.md`.
///
/// # Shapes
/// `xs (.., h)`, `weight (h)`, `bias (h)` -> `(.., h)`; one dtype.
///
/// # Errors
/// When `weight` or `bias` is not as long as the last dimension of `xs`, or a tensor is not f32, bf16 or f16, or two differ in
/// dtype or device.
pub fn layer_norm(xs: &Tensor, weight: &Tensor, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    row_norm::in_graph::<LayerNorm>(xs, weight, bias, eps)
}

/// [`layer_norm`] outside any graph.
///
/// # Shapes
/// `xs (.., h)`, `weight (h)`, `bias (h)` -> `(.., h)`; one dtype.
///
/// # Errors
/// As [`layer_norm`].
pub fn layer_norm_forward(
    xs: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    Ok(row_norm::forward::<LayerNorm>(xs, weight, bias, eps)?.into_tensor())
}

/// Gradient of `xs`, plus `residual` if there is one, and those of the weight and the bias, each only if
/// `parameter_grads` says so; outside any graph.
///
/// `residual` is the gradient that reaches `xs` along the path around the norm; it is added in the same pass. The bias
/// itself is not needed.
///
/// # Shapes
/// `xs`, `dy` and `residual` `(.., h)`, `weight (h)`, of one dtype -> `(.., h)` in that dtype, and `(h)` in f32.
///
/// # Errors
/// When the shapes do not fit or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn layer_norm_backward(
    xs: &Tensor,
    weight: &Tensor,
    dy: &Tensor,
    eps: f64,
    residual: Option<&Tensor>,
    parameter_grads: [bool; 2],
) -> Result<(Tensor, [Option<Tensor>; 2])> {
    row_norm::backward::<LayerNorm>([xs, weight, dy], eps, residual, parameter_grads)
}

/// Writes `x - mean(x)` to `centred`; gives `1 / sqrt(var(x) + eps)`.
#[inline(always)]
fn centre<T: Element>(x: &[T], eps: f64, centred: &mut [f32]) -> f32 {
    let mean = |sum: f32| (f64::from(sum) / x.len() as f64) as f32;
    let first = mean(sum(x, |x| x));
    for (centred, x) in centred.iter_mut().zip(x) {
        *centred = x.widen() - first;
    }
    // What the rounding of a large mean left.
    let rest = mean(sum(centred, |x| x));
    for centred in &mut *centred {
        *centred -= rest;
    }
    (1.0 / (f64::from(dot(centred, centred)) / x.len() as f64 + eps).sqrt()) as f32
}

struct LayerNorm;

impl RowNorm for LayerNorm {
    const NAME: &'static str = "layer_norm";
    const FORWARD: &'static str = "layer_norm_forward";
    const BACKWARD: &'static str = "layer_norm_backward";
    #[cfg(feature = "cuda")]
    const ON_GPU: super::row_norm_gpu::Norm = super::row_norm_gpu::Norm::Layer;

    #[inline(always)]
    fn forward_row<T: Element>(row: InputRow<'_, T>, eps: f64, y: &mut [T]) {
        let InputRow {
            x,
            w,
            b,
            scratch: centred,
        } = row;
        let r = centre(x, eps, centred);
        let values = y.iter_mut().zip(centred).zip(w);
        match b {
            Some(b) => {
                for (((y, centred), w), b) in values.zip(b) {
                    *y = T::nearest(*centred * r * w.widen() + b.widen());
                }
            }
            None => {
                for ((y, centred), w) in values {
                    *y = T::nearest(*centred * r * w.widen());
                }
            }
        }
    }

    /// With `c = x - mean(x)`, `n = c r` and `g = dy w`: `dx = r (g - mean(g) - n mean(g n))`, `dw = sum over rows of dy n`,
    /// `db = sum over rows of dy`.
    #[inline(always)]
    fn backward_row<T: Element>(
        row: GradRow<'_, T>,
        eps: f64,
        dx: &mut [T],
        [dw, db]: [&mut [f32]; 2],
    ) {
        let GradRow {
            x,
            w,
            dy,
            residual,
            scratch: [centred, g],
        } = row;
        let r = centre(x, eps, centred);
        for ((g, dy), w) in g.iter_mut().zip(dy).zip(w) {
            *g = dy.widen() * w.widen();
        }
        let len = x.len() as f32;
        let along_ones = sum(g, |g| g) / len;
        let along_x = r * r * dot(g, centred) / len;
        row_norm::finish_dx(
            dx,
            (g, centred),
            residual,
            #[inline(always)]
            |g, c| r * (g - along_ones - c * along_x),
        );
        for ((dw, dy), c) in dw.iter_mut().zip(dy).zip(&*centred) {
            *dw += dy.widen() * c * r;
        }
        for (db, dy) in db.iter_mut().zip(dy) {
            *db += dy.widen();
        }
    }
}
