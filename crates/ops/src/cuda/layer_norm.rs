//! Layer norm on the GPU; the equations are those of the crate's `layer_norm`, which checks the shapes.

use super::element::{Element, by_dtype};
use super::gpu::{BLOCK, Gpu};
use super::launch;
use super::rms_norm::{MAX_PARTIALS, rows_and_cols, sum_of_partials};
use super::values::Fresh;
use crate::OpOutput;
use crate::host::detached;
use candle_core::{Result, Tensor};

const NAME: &str = "layer_norm";

/// Shared memory of the reductions.
const SHARED_BYTES: usize = 128;

/// `xs` normed, in its shape and dtype.
pub(crate) fn layer_norm_forward(
    xs: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<OpOutput> {
    let (x, w) = (detached(xs)?, detached(weight)?);
    let b = bias.map(detached).transpose()?;
    by_dtype!(NAME, "xs", xs, T => forward::<T>(&x, &w, b.as_ref(), eps as f32))
}

fn forward<T: Element>(
    xs: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f32,
) -> Result<OpOutput> {
    let gpu = Gpu::of(NAME, xs)?;
    let (rows, cols) = rows_and_cols(xs, weight);
    let (x, w) = (gpu.read::<T>("xs", xs)?, gpu.read::<T>("weight", weight)?);
    let b = bias.map(|b| gpu.read::<T>("bias", b)).transpose()?;
    let y = gpu.alloc::<T>(rows * cols)?;
    if rows * cols > 0 {
        let launch = gpu.rows(rows, BLOCK, SHARED_BYTES)?;
        let (num_rows, num_cols) = (rows as i64, gpu.i32(cols)?);
        // SAFETY: y and x have rows * cols values, w and b have cols; the shared memory is what the kernel asks.
        unsafe {
            launch::layer_norm_forward(
                &launch,
                y.out(),
                x.get::<T>(),
                w.get(),
                b.as_ref().map(|b| b.get()),
                num_rows,
                num_cols,
                eps,
            )
        }?;
    }
    Ok(y.into_output(xs.shape()))
}

/// Gradient of `xs`, plus `residual` if there is one, in its dtype; and in f32 those of the weight and the bias that
/// `parameter_grads` asks for.
pub(crate) fn layer_norm_backward(
    xs: &Tensor,
    weight: &Tensor,
    dy: &Tensor,
    eps: f64,
    residual: Option<&Tensor>,
    parameter_grads: [bool; 2],
) -> Result<(Tensor, [Option<Tensor>; 2])> {
    let (x, w, dy) = (detached(xs)?, detached(weight)?, detached(dy)?);
    let residual = residual.map(detached).transpose()?;
    let inputs = [&x, &w, &dy];
    by_dtype!(NAME, "xs", xs, T => backward::<T>(inputs, residual.as_ref(), eps as f32, parameter_grads))
}

fn backward<T: Element>(
    [xs, weight, dy]: [&Tensor; 3],
    residual: Option<&Tensor>,
    eps: f32,
    parameter_grads: [bool; 2],
) -> Result<(Tensor, [Option<Tensor>; 2])> {
    let gpu = Gpu::of(NAME, xs)?;
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
        let shared_bytes = SHARED_BYTES + 4 * cols * num_sums;
        // SAFETY: dx, x, dy and the residual have rows * cols values, w has cols, dw and db a row of cols for each block.
        unsafe {
            launch::layer_norm_backward(
                &gpu.blocks(num_partials, BLOCK, shared_bytes)?,
                dx.out(),
                dw.as_ref().map(Fresh::out),
                db.as_ref().map(Fresh::out),
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
    let [dw, db] = [dw, db].map(|partials| {
        let sum = partials.map(|partials| sum_of_partials(&gpu, &partials, num_partials, cols));
        sum.transpose()
    });
    Ok((dx.into_tensor(xs.shape()), [dw?, db?]))
}
