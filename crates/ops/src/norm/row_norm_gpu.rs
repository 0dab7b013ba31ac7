//! Norms of rows on the GPU.

#![allow(unsafe_code)]

use super::row_norm::RowNorm;
use crate::cuda::element::{Element, by_dtype};
use crate::cuda::gpu::{BLOCK, Gpu};
use crate::cuda::launch;
use crate::cuda::values::Fresh;
use crate::host::op_output::OpOutput;
use crate::host::values::detached;
use candle_core::{Result, Tensor};

/// Blocks of a backward kernel: each leaves a row of partial sums of a parameter's gradient.
const MAX_PARTIALS: usize = 528;

/// Shared memory of the reductions.
const SHARED_BYTES: usize = 128;

/// Which norm.
#[derive(Clone, Copy)]
pub(crate) enum Norm {
    /// It has no bias.
    Rms,
    Layer,
}

/// `xs` normed, in its shape and dtype.
pub(crate) fn norm_forward<N: RowNorm>(
    xs: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<OpOutput> {
    let (x, w) = (detached(xs)?, detached(weight)?);
    let b = bias.map(detached).transpose()?;
    by_dtype!(N::NAME, "xs", xs, T => forward::<N, T>(&x, &w, b.as_ref(), eps as f32))
}

fn forward<N: RowNorm, T: Element>(
    xs: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f32,
) -> Result<OpOutput> {
    let gpu = Gpu::of(N::NAME, xs)?;
    let (rows, cols) = rows_and_cols(xs, weight);
    let (x, w) = (gpu.read::<T>("xs", xs)?, gpu.read::<T>("weight", weight)?);
    let b = bias.map(|b| gpu.read::<T>("bias", b)).transpose()?;
    let y = gpu.alloc::<T>(rows * cols)?;
    if rows * cols > 0 {
        let at = gpu.rows(rows, BLOCK, SHARED_BYTES)?;
        let (out, x, w) = (y.out(), x.get::<T>(), w.get());
        let (rows, cols) = (rows as i64, gpu.i32(cols)?);
        // SAFETY: y and x have rows * cols values, w and b have cols; the shared memory is what the kernels ask.
        unsafe {
            match N::ON_GPU {
                Norm::Rms => launch::rms_norm_forward(&at, out, x, w, rows, cols, eps),
                Norm::Layer => {
                    let b = b.as_ref().map(|b| b.get());
                    launch::layer_norm_forward(&at, out, x, w, b, rows, cols, eps)
                }
            }
        }?;
    }
    Ok(y.into_output(xs.shape()))
}

/// Gradient of `xs`, plus `residual` if there is one, in its dtype; and in f32 those of the weight and the bias that
/// `parameter_grads` asks for.
pub(crate) fn norm_backward<N: RowNorm>(
    [xs, weight, dy]: [&Tensor; 3],
    eps: f64,
    residual: Option<&Tensor>,
    parameter_grads: [bool; 2],
) -> Result<(Tensor, [Option<Tensor>; 2])> {
    let (x, w, dy) = (detached(xs)?, detached(weight)?, detached(dy)?);
    let residual = residual.map(detached).transpose()?;
    let inputs = [&x, &w, &dy];
    by_dtype!(N::NAME, "xs", xs, T => {
        backward::<N, T>(inputs, residual.as_ref(), eps as f32, parameter_grads)
    })
}

fn backward<N: RowNorm, T: Element>(
    [xs, weight, dy]: [&Tensor; 3],
    residual: Option<&Tensor>,
    eps: f32,
    parameter_grads: [bool; 2],
) -> Result<(Tensor, [Option<Tensor>; 2])> {
    let gpu = Gpu::of(N::NAME, xs)?;
    let (rows, cols) = rows_and_cols(xs, weight);
    let num_partials = rows.min(MAX_PARTIALS);
    let (x, w) = (gpu.read::<T>("xs", xs)?, gpu.read::<T>("weight", weight)?);
    let dy = gpu.read::<T>("the gradient", dy)?;
    let r = residual.map(|r| gpu.read::<T>("residual", r)).transpose()?;
    let dx = gpu.alloc::<T>(rows * cols)?;
    let [dw, db] = parameter_grads.map(|wanted| {
        let partials = wanted.then(|| gpu.alloc::<f32>(num_partials * cols));
        partials.transpose()
    });
    let (dw, db) = (dw?, db?);
    if rows * cols > 0 {
        let num_sums: usize = parameter_grads.map(usize::from).iter().sum();
        let at = gpu.blocks(num_partials, BLOCK, SHARED_BYTES + 4 * cols * num_sums)?;
        let (out, x, w, dy) = (dx.out(), x.get::<T>(), w.get(), dy.get());
        let r = r.as_ref().map(|r| r.get());
        let [dw, db] = [&dw, &db].map(|partials| partials.as_ref().map(Fresh::out));
        let (rows, cols) = (rows as i64, gpu.i32(cols)?);
        // SAFETY: dx, x, dy and the residual have rows * cols values, w has cols, dw and db a row of cols for each block.
        unsafe {
            match N::ON_GPU {
                Norm::Rms => launch::rms_norm_backward(&at, out, dw, x, w, dy, r, rows, cols, eps),
                Norm::Layer => {
                    launch::layer_norm_backward(&at, out, dw, db, x, w, dy, r, rows, cols, eps)
                }
            }
        }?;
    }
    let [dw, db] = [dw, db].map(|partials| {
        let sum = partials.map(|partials| sum_of_partials(&gpu, &partials, num_partials, cols));
        sum.transpose()
    });
    Ok((dx.into_tensor(xs.shape()), [dw?, db?]))
}

/// The sum of rows of `cols` partial sums: zeros if there is none.
fn sum_of_partials(
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
fn rows_and_cols(xs: &Tensor, weight: &Tensor) -> (usize, usize) {
    let cols = weight.elem_count();
    (xs.elem_count() / cols.max(1), cols)
}
