//! Root-mean-square norm on the GPU; the equations are those of the crate's `rms_norm`.

use super::launch;
use super::values::{BLOCK, Element, Fresh, Gpu, by_dtype, dims_must_be, same_shape};
use candle_core::{Result, Tensor};

const NAME: &str = "rms_norm";

/// Blocks of the backward kernel: each leaves a row of partial sums of the weight's gradient.
const MAX_PARTIALS: usize = 528;

/// `xs`, or `xs + residual` if there is one, normed; and that sum.
///
/// # Shapes
/// `xs` and `residual` `(.., h)`, `weight (h)`, one dtype, f32 or bf16 -> `(.., h)`, and the same if there is a residual.
///
/// # Errors
/// When the shapes or dtypes do not fit, or a tensor is not on the same GPU.
pub fn rms_norm_forward(
    xs: &Tensor,
    residual: Option<&Tensor>,
    weight: &Tensor,
    eps: f64,
) -> Result<(Tensor, Option<Tensor>)> {
    let x = xs.contiguous()?;
    let residual = residual.map(Tensor::contiguous).transpose()?;
    let w = weight.contiguous()?;
    by_dtype!(NAME, xs.dtype(), T => forward::<T>(&x, residual.as_ref(), &w, eps as f32))
}

fn forward<T: Element>(
    xs: &Tensor,
    residual: Option<&Tensor>,
    weight: &Tensor,
    eps: f32,
) -> Result<(Tensor, Option<Tensor>)> {
    let gpu = Gpu::of(NAME, xs)?;
    let (rows, cols) = rows_and_cols(xs, weight)?;
    if let Some(residual) = residual {
        same_shape(NAME, &[("xs", xs), ("residual", residual)])?;
    }
    let (x, w) = (gpu.read::<T>("xs", xs)?, gpu.read::<T>("weight", weight)?);
    let r = residual.map(|r| gpu.read::<T>("residual", r)).transpose()?;
    let y = gpu.alloc::<T>(rows * cols)?;
    let sum = r
        .as_ref()
        .map(|_| gpu.alloc::<T>(rows * cols))
        .transpose()?;
    if rows * cols > 0 {
        // SAFETY: y, sum, x and the residual have rows * cols values, w has cols; the shared memory is what the kernel asks.
        unsafe {
            launch::rms_norm_forward(
                &gpu.rows(rows, BLOCK, 128)?,
                y.out(),
                sum.as_ref().map(Fresh::out),
                x.get::<T>(),
                r.as_ref().map(|r| r.get()),
                w.get(),
                rows as i64,
                gpu.i32(cols)?,
                eps,
            )
        }?;
    }
    let sum = sum.map(|sum| sum.into_tensor(xs.shape()));
    Ok((y.into_tensor(xs.shape()), sum))
}

/// Gradient of `xs`, plus `residual` if there is one; and that of `weight` if `weight_grad`.
///
/// # Shapes
/// `xs`, `dy` and `residual` `(.., h)`, `weight (h)`, one dtype, f32 or bf16 -> `(.., h)` in that dtype, and `(h)` in f32.
///
/// # Errors
/// When the shapes or dtypes do not fit, or a tensor is not on the same GPU.
pub fn rms_norm_backward(
    xs: &Tensor,
    weight: &Tensor,
    dy: &Tensor,
    eps: f64,
    residual: Option<&Tensor>,
    weight_grad: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    same_shape(NAME, &[("xs", xs), ("the gradient", dy)])?;
    if let Some(residual) = residual {
        same_shape(NAME, &[("xs", xs), ("residual", residual)])?;
    }
    let (x, w, dy) = (xs.contiguous()?, weight.contiguous()?, dy.contiguous()?);
    let residual = residual.map(Tensor::contiguous).transpose()?;
    let inputs = [&x, &w, &dy];
    by_dtype!(NAME, xs.dtype(), T => backward::<T>(inputs, residual.as_ref(), eps as f32, weight_grad))
}

fn backward<T: Element>(
    [xs, weight, dy]: [&Tensor; 3],
    residual: Option<&Tensor>,
    eps: f32,
    weight_grad: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let gpu = Gpu::of(NAME, xs)?;
    let (rows, cols) = rows_and_cols(xs, weight)?;
    let num_partials = rows.min(MAX_PARTIALS);
    let (x, w) = (gpu.read::<T>("xs", xs)?, gpu.read::<T>("weight", weight)?);
    let dy = gpu.read::<T>("the gradient", dy)?;
    let r = residual.map(|r| gpu.read::<T>("residual", r)).transpose()?;
    let dx = gpu.alloc::<T>(rows * cols)?;
    if rows * cols == 0 {
        let dw = weight_grad.then(|| weight.zeros_like()?.to_dtype(candle_core::DType::F32));
        return Ok((dx.into_tensor(xs.shape()), dw.transpose()?));
    }
    let partials = weight_grad
        .then(|| gpu.alloc::<f32>(num_partials * cols))
        .transpose()?;
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
    let dw = partials.map(|partials| {
        let dw = gpu.alloc::<f32>(cols)?;
        let launch = gpu.blocks(cols.div_ceil(32), BLOCK, 1024)?;
        let (src, rows, cols) = (partials.out().read(), num_partials as i64, cols as i64);
        // SAFETY: partials has num_partials rows of cols values, dw has cols.
        unsafe { launch::column_sum::<f32>(&launch, dw.out(), src, rows, cols, 0) }?;
        Ok::<_, candle_core::Error>(dw.into_tensor(weight.shape()))
    });
    Ok((dx.into_tensor(xs.shape()), dw.transpose()?))
}

fn rows_and_cols(xs: &Tensor, weight: &Tensor) -> Result<(usize, usize)> {
    let cols = weight.dims1()?;
    match xs.dims() {
        [leading @ .., last] if *last == cols => Ok((leading.iter().product(), cols)),
        dims => {
            dims_must_be(
                NAME,
                "xs",
                xs,
                &[&dims[..dims.len().saturating_sub(1)], &[cols]].concat(),
            )?;
            Ok((0, cols))
        }
    }
}
