//! Linear layer `y = x W^T + b` on the rows of `x`, and its pieces for layers that communicate in between.
//!
//! `dx = dy W`, `dW = dy^T x`, `db = sum over rows of dy`. Compared with candle's matmul under candle's backward: no
//! gradient for frozen weights, and no zeros and additions per edge.

use crate::chunks::{for_each_chunk, rows_per_chunk, rows_per_partial, sum_partials};
use crate::host::HostF32;
use crate::{with_backward2, with_backward3};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Result, Storage, Tensor, bail};

const NAME: &str = "linear";

/// `xs W^T + bias`, differentiable in all three; a gradient is computed only for what is tracked.
///
/// # Shapes
/// `xs (.., in)`, `weight (out, in)`, `bias (out)` -> `(.., out)`; f32.
///
/// # Errors
/// When the shapes do not fit or a tensor is not f32 on the CPU.
pub fn linear(xs: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let y = forward(xs, weight, bias)?;
    let (x, w) = (xs.detach(), weight.detach());
    let (x_tracked, w_tracked) = (xs.track_op(), weight.track_op());
    let grads = move |dy: &Tensor| -> Result<(Option<Tensor>, Option<Tensor>)> {
        let dx = x_tracked.then(|| linear_input_grad(dy, &w));
        let dw = w_tracked.then(|| linear_weight_grad(dy, &x));
        Ok((dx.transpose()?, dw.transpose()?))
    };
    let Some(bias) = bias else {
        return with_backward2(xs, weight, y, NAME, grads);
    };
    let bias_tracked = bias.track_op();
    with_backward3(xs, weight, bias, y, NAME, move |dy| {
        let (dx, dw) = grads(dy)?;
        let db = bias_tracked.then(|| linear_bias_grad(dy));
        Ok((dx, dw, db.transpose()?))
    })
}

/// `xs W^T + bias` outside any graph.
///
/// # Shapes
/// `xs (.., in)`, `weight (out, in)`, `bias (out)` -> `(.., out)`; f32.
///
/// # Errors
/// When the shapes do not fit or a tensor is not f32 on the CPU.
pub fn linear_forward(xs: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let (y, shape) = forward(xs, weight, bias)?;
    Tensor::from_vec(y, shape, xs.device())
}

/// Gradient of the input: `dx = dy W`, outside any graph.
///
/// # Shapes
/// `dy (.., out)`, `weight (out, in)` -> `(.., in)`; f32.
///
/// # Errors
/// When the shapes do not fit or a tensor is not f32 on the CPU.
pub fn linear_input_grad(dy: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let (num_out, num_in) = weight_dims("linear_input_grad", weight)?;
    let (rows, mut dims) = rows_of("linear_input_grad", "dy", dy, num_out)?;
    dims.push(num_in);
    let dy2 = HostF32::new("linear_input_grad", "dy", dy)?
        .tensor()
        .reshape((rows, num_out))?;
    let w = HostF32::new("linear_input_grad", "weight", weight)?;
    Tensor::from_vec(product(&dy2, w.tensor())?, dims, dy.device())
}

/// Gradient of the weight: `dW = dy^T x`, outside any graph.
///
/// # Shapes
/// `dy (.., out)`, `xs (.., in)` with the same leading dimensions -> `(out, in)`; f32.
///
/// # Errors
/// When the shapes do not fit or a tensor is not f32 on the CPU.
pub fn linear_weight_grad(dy: &Tensor, xs: &Tensor) -> Result<Tensor> {
    let op = "linear_weight_grad";
    let (&[.., num_out], &[.., num_in]) = (dy.dims(), xs.dims()) else {
        bail!(
            "{op}: expected dy (.., out) and xs (.., in), got {:?} and {:?}",
            dy.dims(),
            xs.dims()
        )
    };
    let (rows, dy_dims) = rows_of(op, "dy", dy, num_out)?;
    let (_, xs_dims) = rows_of(op, "xs", xs, num_in)?;
    if dy_dims != xs_dims {
        bail!(
            "{op}: expected dy and xs with the same leading dimensions, got dy {:?} and xs {:?}",
            dy.dims(),
            xs.dims()
        )
    }
    let dy2 = HostF32::new(op, "dy", dy)?
        .tensor()
        .reshape((rows, num_out))?;
    let x2 = HostF32::new(op, "xs", xs)?
        .tensor()
        .reshape((rows, num_in))?;
    Tensor::from_vec(product(&dy2.t()?, &x2)?, (num_out, num_in), dy.device())
}

/// Gradient of the bias: the sum of `dy` over its rows, outside any graph.
///
/// # Shapes
/// `dy (.., out)` -> `(out)`; f32.
///
/// # Errors
/// When `dy` has no dimension or is not f32 on the CPU.
pub fn linear_bias_grad(dy: &Tensor) -> Result<Tensor> {
    let &[.., num_out] = dy.dims() else {
        bail!("linear_bias_grad: expected dy (.., out), got a scalar")
    };
    let values = HostF32::new("linear_bias_grad", "dy", dy)?;
    let values = values.read();
    let rows = rows_per_partial(values.len() / num_out.max(1), num_out);
    let mut partials = vec![0f32; values.len().div_ceil((rows * num_out).max(1)) * num_out];
    for_each_chunk(&mut partials, num_out, values.len(), |chunk, sum| {
        let chunk = values.chunks(rows * num_out).nth(chunk).unwrap_or_default();
        for dy in chunk.chunks_exact(num_out) {
            for (sum, dy) in sum.iter_mut().zip(dy) {
                *sum += dy;
            }
        }
    });
    Tensor::from_vec(sum_partials(&partials, num_out), num_out, dy.device())
}

fn forward(xs: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<(Vec<f32>, Vec<usize>)> {
    let (num_out, num_in) = weight_dims(NAME, weight)?;
    let (rows, mut dims) = rows_of(NAME, "xs", xs, num_in)?;
    dims.push(num_out);
    let x2 = HostF32::new(NAME, "xs", xs)?
        .tensor()
        .reshape((rows, num_in))?;
    let w = HostF32::new(NAME, "weight", weight)?;
    let mut y = product(&x2, &w.tensor().t()?)?;
    if let Some(bias) = bias {
        if bias.dims() != [num_out] {
            bail!("{NAME}: expected bias ({num_out}), got {:?}", bias.dims())
        }
        let bias = HostF32::new(NAME, "bias", bias)?;
        let bias = bias.read();
        let work = y.len();
        for_each_chunk(&mut y, rows_per_chunk(num_out) * num_out, work, |_, y| {
            for row in y.chunks_exact_mut(num_out) {
                for (y, bias) in row.iter_mut().zip(&*bias) {
                    *y += bias;
                }
            }
        });
    }
    Ok((y, dims))
}

fn weight_dims(op: &str, weight: &Tensor) -> Result<(usize, usize)> {
    match *weight.dims() {
        [num_out, num_in] => Ok((num_out, num_in)),
        ref dims => bail!("{op}: expected weight (out, in), got {dims:?}"),
    }
}

/// Number of rows of `tensor (.., len)`, and its leading dimensions.
fn rows_of(op: &str, what: &str, tensor: &Tensor, len: usize) -> Result<(usize, Vec<usize>)> {
    match tensor.dims() {
        [leading @ .., last] if *last == len => Ok((leading.iter().product(), leading.to_vec())),
        dims => bail!("{op}: expected {what} (.., {len}), got {dims:?}"),
    }
}

/// `a (m, k)` times `b (k, n)` by candle's matmul, as the bare values: a tensor would not give them up.
fn product(a: &Tensor, b: &Tensor) -> Result<Vec<f32>> {
    let ((m, k), (_, n)) = (a.dims2()?, b.dims2()?);
    if m == 0 || n == 0 || k == 0 {
        return Ok(vec![0f32; m * n]);
    }
    let ((a_guard, a_layout), (b_guard, b_layout)) =
        (a.storage_and_layout(), b.storage_and_layout());
    match (&*a_guard, &*b_guard) {
        (Storage::Cpu(a), Storage::Cpu(b)) => {
            match a.matmul(b, (1, m, n, k), a_layout, b_layout)? {
                CpuStorage::F32(values) => Ok(values),
                other => bail!("{NAME}: expected an f32 product, got {:?}", other.dtype()),
            }
        }
        _ => bail!("{NAME}: expected tensors on the CPU"),
    }
}
