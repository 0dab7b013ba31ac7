//! Linear layer `y = x W^T + b` on the rows of `x`.
//!
//! Compared with candle's matmul under candle's backward: no gradient for frozen weights, no zeros and additions per
//! edge, and no transposed copies.

#[cfg(feature = "cuda")]
use crate::cuda::Added;
use crate::dispatch::on_cuda;
use crate::element::{Element, by_float};
use crate::half_precision::widened;
use crate::host_floats::{HostFloats, one_dtype};
use crate::linear_grad::{linear_bias_grad, linear_input_grad, linear_weight_grad};
use crate::matrix::{Addend, Factors, Matrix};
use crate::matrix_product::parallel_product;
use crate::op_timer;
use crate::{OpOutput, ProductChoice, with_backward2, with_backward3};
use candle_core::{Result, Tensor, bail};

const NAME: &str = "linear";

/// `xs W^T + bias`, differentiable in all three; a gradient is computed only for what is tracked.
///
/// Relative error against f64 about 2e-7, whatever the length of the sums: see `docs/accuracy.md`.
///
/// # Shapes
/// `xs (.., in)`, `weight (out, in)`, `bias (out)` -> `(.., out)`; one dtype.
///
/// # Errors
/// When the shapes do not fit or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
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
/// `xs (.., in)`, `weight (out, in)`, `bias (out)` -> `(.., out)`; one dtype.
///
/// # Errors
/// When the shapes do not fit or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn linear_forward(xs: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    Ok(forward(xs, weight, bias)?.into_tensor())
}

/// `residual + xs W^T` outside any graph: rounded once.
///
/// # Shapes
/// `residual (.., out)`, `xs (.., in)` with the same leading dimensions, `weight (out, in)` -> `(.., out)`; one dtype.
///
/// # Errors
/// When the shapes do not fit or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn linear_forward_add(residual: &Tensor, xs: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let op = "linear_forward_add";
    let dims = dims(op, xs, weight)?;
    if residual.dims() != dims {
        bail!(
            "{op}: expected residual {dims:?}, got {:?}",
            residual.dims()
        )
    }
    on_cuda!(xs => {
        let residual = Added::Residual(residual);
        Ok(crate::cuda::linear_forward(op, &dims, xs, weight, residual)?.into_tensor())
    });
    let _timer = op_timer::product(op, &dims, weight.dims()[1], [xs.dtype(); 2]);
    let product = Rows::new(op, xs, weight)?;
    let residual = HostFloats::new(op, "residual", residual)?;
    one_dtype(op, &[("residual", &residual), ("xs", &product.xs)])?;
    Ok(by_float!(product.xs.dtype(), T => {
        let y = product.compute::<T>(Addend::Values(&residual.read_as()));
        OpOutput::of(y, dims).into_tensor()
    }))
}

fn forward(xs: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<OpOutput> {
    let dims = dims(NAME, xs, weight)?;
    let num_out = weight.dims()[0];
    if let Some(bias) = bias.filter(|bias| bias.dims() != [num_out]) {
        bail!("{NAME}: expected bias ({num_out}), got {:?}", bias.dims())
    }
    on_cuda!(xs => {
        let bias = bias.map_or(Added::Nothing, Added::Bias);
        crate::cuda::linear_forward(NAME, &dims, xs, weight, bias)
    });
    let _timer = op_timer::product(NAME, &dims, weight.dims()[1], [xs.dtype(); 2]);
    let product = Rows::new(NAME, xs, weight)?;
    let bias = match bias {
        Some(bias) => {
            let bias = HostFloats::new(NAME, "bias", bias)?;
            let dtype = one_dtype(NAME, &[("xs", &product.xs), ("bias", &bias)])?;
            Some(by_float!(dtype, T => widened(&bias.read_as::<T>())))
        }
        None => None,
    };
    Ok(by_float!(product.xs.dtype(), T => {
        let addend = bias.as_deref().map_or(Addend::Nothing, Addend::Bias);
        OpOutput::of(product.compute::<T>(addend), dims)
    }))
}

/// `x W^T`, checked and ready to be computed.
struct Rows {
    xs: HostFloats,
    weight: HostFloats,
    rows: usize,
    num_in: usize,
    num_out: usize,
}

impl Rows {
    fn new(op: &str, xs: &Tensor, weight: &Tensor) -> Result<Self> {
        let (num_out, num_in) = weight_dims(op, weight)?;
        let (rows, _) = rows_of(op, "xs", xs, num_in)?;
        ProductChoice::from_env()?;
        let xs = HostFloats::new(op, "xs", xs)?;
        let weight = HostFloats::new(op, "weight", weight)?;
        one_dtype(op, &[("xs", &xs), ("weight", &weight)])?;
        Ok(Self {
            xs,
            weight,
            rows,
            num_in,
            num_out,
        })
    }

    /// The product of values of `T`.
    fn compute<T: Element>(&self, addend: Addend<'_, T>) -> Vec<T> {
        let (xs, weight) = (self.xs.read_as::<T>(), self.weight.read_as::<T>());
        parallel_product(addend, &[self.factors(&xs, &weight)])
    }

    fn factors<'a, T>(&self, xs: &'a [T], weight: &'a [T]) -> Factors<'a, T> {
        (
            Matrix::new(xs, self.rows, self.num_in, self.num_in),
            Matrix::new(weight, self.num_out, self.num_in, self.num_in).t(),
        )
    }
}

/// Shape of `xs W^T`.
fn dims(op: &str, xs: &Tensor, weight: &Tensor) -> Result<Vec<usize>> {
    let (num_out, num_in) = weight_dims(op, weight)?;
    let (_, leading) = rows_of(op, "xs", xs, num_in)?;
    Ok([leading, &[num_out]].concat())
}

/// `(out, in)` of a weight.
pub(crate) fn weight_dims(op: &str, weight: &Tensor) -> Result<(usize, usize)> {
    match *weight.dims() {
        [num_out, num_in] => Ok((num_out, num_in)),
        ref dims => bail!("{op}: expected weight (out, in), got {dims:?}"),
    }
}

/// Number of rows of `tensor (.., len)`, and its leading dimensions.
pub(crate) fn rows_of<'a>(
    op: &str,
    what: &str,
    tensor: &'a Tensor,
    len: usize,
) -> Result<(usize, &'a [usize])> {
    match tensor.dims() {
        [leading @ .., last] if *last == len => Ok((leading.iter().product(), leading)),
        dims => bail!("{op}: expected {what} (.., {len}), got {dims:?}"),
    }
}
