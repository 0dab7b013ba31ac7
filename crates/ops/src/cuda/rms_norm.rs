//! Root-mean-square norm on the GPU; the equations are those of the crate's `rms_norm`, which checks the shapes.

use super::element::{Element, by_dtype};
use super::gpu::{BLOCK, Gpu};
use super::launch;
use super::values::Fresh;
use crate::OpOutput;
use crate::host::detached;
use candle_core::{Result, Tensor};

const NAME: &str = "rms_norm";

/// Blocks of the backward kernel of a norm: each leaves a row of partial sums of a parameter's gradient.
pub(super) const MAX_PARTIALS: usize = 528;

/// `xs` normed, in its shape and dtype.
pub(crate) fn rms_norm_forward(xs: &Tensor, weight: &Tensor, eps: f64) -> Result<OpOutput> {
    by_dtype!(NAME, "xs", xs, T => forward::<T>(&detached(xs)?, &detached(weight)?, eps as f32))
}

fn forward<T: Element>(xs: &Tensor, weight: &Tensor, eps: f32) -> Result<OpOutput> {
    let gpu = Gpu::of(NAME, xs)?;
    let (rows, cols) = rows_and_cols(xs, weight);
    let (x, w) = (gpu.read::<T>("xs", xs)?, gpu.read::<T>("weight", weight)?);
    let y = gpu.alloc::<T>(rows * cols)?;
    if rows * cols > 0 {
        let launch = gpu.rows(rows, BLOCK, 128)?;
        let (num_rows, num_cols) = (rows as i64, gpu.i32(cols)?);
        // SAFETY: y and x have rows * cols values, w has cols; the shared memory is what the kernel asks.
        unsafe {
            launch::rms_norm_forward(
                &launch,
                y.out(),
                x.get::<T>(),
                w.get(),
                num_rows,
                num_cols,
                eps,
            )
        }?;
    }
    Ok(y.into_output(xs.shape()))
}

/// Gradient of `xs`, plus `residual` if there is one, in its dtype; and that of `weight`, in f32, if `weight_grad`.
pub(crate) fn rms_norm_backward(
    xs: &Tensor,
    weight: &Tensor,
    dy: &Tensor,
    eps: f64,
    residual: Option<&Tensor>,
    weight_grad: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let (x, w, dy) = (detached(xs)?, detached(weight)?, detached(dy)?);
    let residual = residual.map(detached).transpose()?;
    let inputs = [&x, &w, &dy];
    by_dtype!(NAME, "xs", xs, T => backward::<T>(inputs, residual.as_ref(), eps as f32, weight_grad))
}

fn backward<T: Element>(
    [xs, weight, dy]: [&Tensor; 3],
    residual: Option<&Tensor>,
    eps: f32,
    weight_grad: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let gpu = Gpu::of(NAME, xs)?;
    let (rows, cols) = rows_and_cols(xs, weight);
    let num_partials = rows.min(MAX_PARTIALS);
    let (x, w) = (gpu.read::<T>("xs", xs)?, gpu.read::<T>("weight", weight)?);
    let dy = gpu.read::<T>("the gradient", dy)?;
    let r = residual.map(|r| gpu.read::<T>("residual", r)).transpose()?;
    let dx = gpu.alloc::<T>(rows * cols)?;
    let partials = weight_grad
        .then(|| gpu.alloc::<f32>(num_partials * cols))
        .transpose()?;
    if rows * cols > 0 {
        let shared_bytes = 256 + if weight_grad { 4 * cols } else { 0 };
        // SAFETY: dx, x, dy and the residual have rows * cols values, w has cols, partials a row of cols for each block.
        unsafe {
            launch::rms_norm_backward(
                &gpu.blocks(num_partials, BLOCK, shared_bytes)?,
                dx.out(),
                partials.as_ref().map(Fresh::out),
                x.get::<T>(),
                w.get(),
                dy.get(),
                r.as_ref().map(|r| r.get()),
                rows as i64,
                gpu.i32(cols)?,
                eps,
            )
        }?;
    }
    let dw = partials.map(|partials| sum_of_partials(&gpu, &partials, num_partials, cols));
    Ok((dx.into_tensor(xs.shape()), dw.transpose()?))
}

/// The sum of rows of `cols` partial sums: zeros if there is none.
pub(super) fn sum_of_partials(
    gpu: &Gpu,
    partials: &Fresh<f32>,
    num_partials: usize,
    cols: usize,
) -> Result<Tensor> {
    let dw = gpu.alloc::<f32>(cols)?;
    if cols > 0 {
        let launch = gpu.blocks(cols.div_ceil(32), BLOCK, 1024)?;
        let (src, rows) = (partials.out().read(), num_partials as i64);
        // SAFETY: partials has num_partials rows of cols values, dw has cols.
        unsafe { launch::column_sum::<f32>(&launch, dw.out(), src, rows, cols as i64, 0) }?;
    }
    Ok(dw.into_tensor(cols))
}

/// Of `xs (.., h)` and `weight (h)`.
pub(super) fn rows_and_cols(xs: &Tensor, weight: &Tensor) -> (usize, usize) {
    let cols = weight.elem_count();
    (xs.elem_count() / cols.max(1), cols)
}
