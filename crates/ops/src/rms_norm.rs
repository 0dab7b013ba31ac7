//! Root-mean-square normalisation: `y = x / sqrt(mean(x^2) + eps) * w` (Zhang and Sennrich 2019, arXiv:1910.07467).

use crate::chunks::{SUMMED_ROWS, rows_per_chunk, rows_per_partial, sum_partials};
use crate::dispatch::on_cuda;
use crate::filled::{filled, filled2};
use crate::host_floats::{HostFloats, one_dtype};
use crate::lanes::dot;
use crate::vectorised::vectorised;
use crate::{OpOutput, with_backward2};
use candle_core::{Result, Tensor, bail};

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
/// When `weight` is not as long as the last dimension of `xs`, or a tensor is not f32 or bf16, or two differ in dtype or device.
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
/// When `weight` is not as long as the last dimension of `xs`, or a tensor is not f32 or bf16, or two differ in dtype or device.
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
/// When the shapes do not fit or a tensor is not f32 or bf16, or two differ in dtype or device.
pub fn rms_norm_backward(
    xs: &Tensor,
    weight: &Tensor,
    dy: &Tensor,
    eps: f64,
    residual: Option<&Tensor>,
    weight_grad: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let h = width(xs, weight)?;
    for (what, tensor) in [("the gradient", Some(dy)), ("residual", residual)] {
        if let Some(tensor) = tensor.filter(|tensor| tensor.dims() != xs.dims()) {
            bail!(
                "{NAME}: expected {what} of the shape of xs {:?}, got {:?}",
                xs.dims(),
                tensor.dims()
            )
        }
    }
    on_cuda!(xs => crate::cuda::rms_norm_backward(xs, weight, dy, eps, residual, weight_grad));
    let x = HostFloats::new(NAME, "xs", xs)?;
    let w = HostFloats::new(NAME, "weight", weight)?;
    let dy = HostFloats::new(NAME, "the gradient", dy)?;
    let residual = residual
        .map(|residual| HostFloats::new(NAME, "residual", residual))
        .transpose()?;
    let inputs = [("xs", &x), ("weight", &w), ("the gradient", &dy)];
    let dtype = one_dtype(NAME, &inputs)?;
    if let Some(residual) = &residual {
        one_dtype(NAME, &[("xs", &x), ("residual", residual)])?;
    }
    let residual = residual.as_ref().map(HostFloats::read);
    let inputs = (&x.read()[..], &w.read()[..], &dy.read()[..]);
    let (dx, dw) = backward(inputs, residual.as_deref(), h, eps, weight_grad);
    let dw = weight_grad.then(|| Tensor::from_vec(dw, h, xs.device()));
    Ok((
        OpOutput::rounded(dx, dtype, xs.shape()).into_tensor(),
        dw.transpose()?,
    ))
}

/// Length of a row, of inputs that fit.
fn width(xs: &Tensor, weight: &Tensor) -> Result<usize> {
    match xs.dims() {
        [.., h] if weight.dims() == [*h] => Ok(*h),
        dims => bail!(
            "{NAME}: expected xs (.., h) and weight (h), got xs {dims:?} and weight {:?}",
            weight.dims()
        ),
    }
}

/// `1 / sqrt(mean(x^2) + eps)` of one row.
#[inline(always)]
fn inverse_rms(x: &[f32], eps: f64) -> f32 {
    (1.0 / (dot(x, x) as f64 / x.len() as f64 + eps).sqrt()) as f32
}

fn forward(xs: &Tensor, weight: &Tensor, eps: f64) -> Result<OpOutput> {
    let h = width(xs, weight)?;
    on_cuda!(xs => crate::cuda::rms_norm_forward(xs, weight, eps));
    let x = HostFloats::new(NAME, "xs", xs)?;
    let w = HostFloats::new(NAME, "weight", weight)?;
    let dtype = one_dtype(NAME, &[("xs", &x), ("weight", &w)])?;
    let (x, w) = (x.read(), w.read());
    let chunk_len = rows_per_chunk(h) * h;
    let y = filled(x.len(), chunk_len, x.len(), |chunk, y| {
        let x = &x[chunk * chunk_len..][..y.len()];
        for (x, y) in x.chunks_exact(h).zip(y.chunks_exact_mut(h)) {
            vectorised(
                #[inline(always)]
                || forward_row(x, &w, eps, y),
            );
        }
    });
    Ok(OpOutput::rounded(y, dtype, xs.shape()))
}

#[inline(always)]
fn forward_row(x: &[f32], w: &[f32], eps: f64, y: &mut [f32]) {
    let r = inverse_rms(x, eps);
    for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
        *y = x * r * w;
    }
}

/// With `n = x r` and `g = dy w`: `dx = r (g - n mean(g n))`, `dw = sum over rows of dy n`.
fn backward(
    (x, w, dy): (&[f32], &[f32], &[f32]),
    residual: Option<&[f32]>,
    h: usize,
    eps: f64,
    weight_grad: bool,
) -> (Vec<f32>, Vec<f32>) {
    let rows = rows_per_partial(x.len() / h.max(1), h);
    let num_chunks = x.len().div_ceil((rows * h).max(1));
    let sizes = [(x.len(), rows * h), (num_chunks * h, h)];
    let (dx, partials) = filled2(sizes[0], sizes[1], 2 * x.len(), |chunk, dx, dw| {
        let mut block_dw = vec![0f32; if weight_grad { h } else { 0 }];
        for (block, dx) in dx.chunks_mut(SUMMED_ROWS * h.max(1)).enumerate() {
            let first_row = chunk * rows + block * SUMMED_ROWS;
            for (row, dx) in dx.chunks_exact_mut(h).enumerate() {
                let start = (first_row + row) * h;
                let (x, dy) = (&x[start..][..h], &dy[start..][..h]);
                let residual = residual.map(|residual| &residual[start..][..h]);
                let dw = weight_grad.then_some(&mut block_dw[..]);
                vectorised(
                    #[inline(always)]
                    || backward_row((x, w, dy), residual, eps, dx, dw),
                );
            }
            for (dw, block_dw) in dw.iter_mut().zip(&mut block_dw) {
                *dw += std::mem::take(block_dw);
            }
        }
    });
    let mut dw = vec![0f32; h];
    sum_partials(&mut dw, true, &partials);
    (dx, dw)
}

/// Adds to `dw` what the row contributes, if that is wanted.
#[inline(always)]
fn backward_row(
    (x, w, dy): (&[f32], &[f32], &[f32]),
    residual: Option<&[f32]>,
    eps: f64,
    dx: &mut [f32],
    dw: Option<&mut [f32]>,
) {
    let r = inverse_rms(x, eps);
    for ((g, dy), w) in dx.iter_mut().zip(dy).zip(w) {
        *g = dy * w;
    }
    let along_x = r * r * dot(dx, x) / x.len() as f32;
    match residual {
        Some(residual) => {
            for ((dx, x), residual) in dx.iter_mut().zip(x).zip(residual) {
                *dx = residual + r * (*dx - x * along_x);
            }
        }
        None => {
            for (dx, x) in dx.iter_mut().zip(x) {
                *dx = r * (*dx - x * along_x);
            }
        }
    }
    if let Some(dw) = dw {
        for ((dw, dy), x) in dw.iter_mut().zip(dy).zip(x) {
            *dw += dy * x * r;
        }
    }
}
