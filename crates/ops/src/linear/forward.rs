//! Linear layer `y = x W^T + b` on the rows of `x`.
//!
//! Compared with candle's matmul under candle's backward: no gradient for frozen weights, no zeros and additions per
//! edge, and no transposed copies.

use super::gguf_blocks::{BlockFormat, Q4KBlocks, Q8Blocks, RowsOfBlocks};
use super::grad::{linear_bias_grad, linear_input_grad, linear_weight_grad};
use super::weight::{Added, LinearWeight, rows_of, weight_dims};
use crate::cpu::element::{Element, by_float};
use crate::cpu::half_precision::widened;
use crate::host::floats::{HostFloats, one_dtype};
use crate::host::on_cuda::on_cuda;
use crate::host::op_output::OpOutput;
use crate::host::values::Host;
use crate::host::with_backward::with_backward;
use crate::product::factors::Factors;
use crate::product::few_rows::{Floats, MAX_ROWS, RowsOfF32, few_rows};
use crate::product::matrix::{Addend, Matrix};
use crate::product::packed_weight::WeightUse;
use crate::product::products::{new_product, parallel_product};
use crate::settings::product_choice::{ProductChoice, ProductSize};
use crate::timing::op_timer;
use candle_core::{DType, Result, Tensor, bail};

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
    let added = bias.map_or(Added::Nothing, Added::Bias);
    let y = forward(NAME, xs, weight.into(), added)?;
    let (x, w) = (xs.detach(), weight.detach());
    let (x_tracked, w_tracked) = (xs.track_op(), weight.track_op());
    let grads = move |dy: &Tensor| {
        let dx = x_tracked.then(|| linear_input_grad(dy, &w));
        let dw = w_tracked.then(|| linear_weight_grad(dy, &x));
        Ok([dx.transpose()?, dw.transpose()?])
    };
    let Some(bias) = bias else {
        return with_backward([xs, weight], y, NAME, grads);
    };
    let bias_tracked = bias.track_op();
    with_backward([xs, weight, bias], y, NAME, move |dy| {
        let [dx, dw] = grads(dy)?;
        let db = bias_tracked.then(|| linear_bias_grad(dy));
        Ok([dx, dw, db.transpose()?])
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
    LinearWeight::from(weight).forward(xs, bias)
}

/// How the rows of a weight lie in a tensor (out, ..).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeldRows {
    /// As values, of the tensor's type.
    Floats,
    /// In blocks of 32 values, as the bytes of `GgmlDType::Q8_0` of candle.
    Q8_0,
    /// In blocks of 256 values, as those of `GgmlDType::Q4K`.
    Q4K,
}

/// `xs W^T + bias + residual` outside any graph, rounded once, of a weight in another form than that of `xs`, which is not unpacked; `None` on a GPU, and
/// for more than 16 rows, for which it is faster to unpack it.
///
/// # Shapes
/// `xs (.., in)`, `weight (out, in)`, of blocks `(out, bytes)`, one of `bias (out)` and `residual (.., out)` -> `(.., out)`; all but the
/// weight of one type.
///
/// # Errors
/// When the shapes or types do not fit, and rows that are not whole blocks.
pub fn linear_of_few_rows(
    xs: &Tensor,
    weight: &Tensor,
    form: HeldRows,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
) -> Result<Option<Tensor>> {
    let op = "linear_of_few_rows";
    let (num_out, row_len) = weight_dims(op, weight)?;
    let num_in = match form {
        HeldRows::Floats => row_len,
        HeldRows::Q8_0 => values_of::<Q8Blocks>(op, weight, row_len)?,
        HeldRows::Q4K => values_of::<Q4KBlocks>(op, weight, row_len)?,
    };
    let (rows, leading) = rows_of(op, "xs", xs, num_in)?;
    if rows > MAX_ROWS || !xs.device().is_cpu() {
        return Ok(None);
    }
    let dims = [leading, &[num_out]].concat();
    let added = match (bias, residual) {
        (None, None) => None,
        (Some(bias), None) if bias.dims() == [num_out] => Some(bias),
        (None, Some(residual)) if residual.dims() == dims => Some(residual),
        _ => bail!(
            "{op}: expected bias ({num_out}) or residual {dims:?}, got {:?} and {:?}",
            bias.map(Tensor::dims),
            residual.map(Tensor::dims)
        ),
    };
    let _timer = op_timer::product(op, &dims, num_in, [xs.dtype(), weight.dtype()]);
    let xs = HostFloats::new(op, "xs", xs)?;
    let added = added.map(|added| HostFloats::new(op, "bias or residual", added));
    let added = added.transpose()?;
    if let Some(added) = &added {
        one_dtype(op, &[("xs", &xs), ("bias or residual", added)])?;
    }
    let in_f32 = by_float!(xs.dtype(), T => {
        let xs = xs.read_as::<T>();
        RowsOfF32::new((0..rows).map(|row| &xs[row * num_in..][..num_in]), num_in)
    });
    let mut sums = if form == HeldRows::Floats {
        let weight = HostFloats::new(op, "weight", weight)?;
        by_float!(weight.dtype(), T => {
            few_rows(rows, num_out, &[(in_f32, Floats::new(&weight.read_as::<T>(), num_in))])
        })
    } else {
        let weight = Host::<u8>::new(op, "weight", weight)?;
        let bytes = weight.read();
        match form {
            HeldRows::Q4K => {
                let weight = RowsOfBlocks::<Q4KBlocks>::new(&bytes, num_in);
                few_rows(rows, num_out, &[(in_f32, weight)])
            }
            _ => {
                let weight = RowsOfBlocks::<Q8Blocks>::new(&bytes, num_in);
                few_rows(rows, num_out, &[(in_f32, weight)])
            }
        }
    };
    Ok(Some(by_float!(xs.dtype(), T => {
        let ys = with_addend::<T, _>(added.as_ref(), bias.is_some(), |addend| {
            new_product(rows, num_out, |ys| ys.put_sums(addend, &mut sums))
        });
        OpOutput::of(ys, dims).into_tensor()
    })))
}

/// Values of a row of so many bytes.
fn values_of<B: BlockFormat>(op: &str, weight: &Tensor, row_bytes: usize) -> Result<usize> {
    if weight.dtype() != DType::U8 || !row_bytes.is_multiple_of(B::BYTES) {
        bail!(
            "{op}: expected a weight of bytes, {} for each {} values of a row, got {:?} of {row_bytes}",
            B::BYTES,
            B::VALUES,
            weight.dtype()
        )
    }
    Ok(row_bytes / B::BYTES * B::VALUES)
}

/// `residual + xs W^T` outside any graph: rounded once.
///
/// # Shapes
/// `residual (.., out)`, `xs (.., in)` with the same leading dimensions, `weight (out, in)` -> `(.., out)`; one dtype.
///
/// # Errors
/// When the shapes do not fit or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn linear_forward_add(residual: &Tensor, xs: &Tensor, weight: &Tensor) -> Result<Tensor> {
    LinearWeight::from(weight).forward_add(residual, xs)
}

impl LinearWeight<'_> {
    /// [`linear_forward`] with this weight.
    ///
    /// # Errors
    /// Those of [`linear_forward`].
    pub fn forward(self, xs: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        Ok(forward(NAME, xs, self, bias.map_or(Added::Nothing, Added::Bias))?.into_tensor())
    }

    /// [`linear_forward_add`] with this weight.
    ///
    /// # Errors
    /// Those of [`linear_forward_add`].
    pub fn forward_add(self, residual: &Tensor, xs: &Tensor) -> Result<Tensor> {
        let residual = Added::Residual(residual);
        Ok(forward("linear_forward_add", xs, self, residual)?.into_tensor())
    }
}

fn forward(
    op: &'static str,
    xs: &Tensor,
    weight: LinearWeight<'_>,
    added: Added<'_>,
) -> Result<OpOutput> {
    let LinearWeight {
        values: weight,
        packed,
    } = weight;
    let (num_out, num_in) = weight_dims(op, weight)?;
    let (rows, leading) = rows_of(op, "xs", xs, num_in)?;
    let dims = [leading, &[num_out]].concat();
    match added {
        Added::Bias(bias) if bias.dims() != [num_out] => {
            bail!("{op}: expected bias ({num_out}), got {:?}", bias.dims())
        }
        Added::Residual(residual) if residual.dims() != dims => bail!(
            "{op}: expected residual {dims:?}, got {:?}",
            residual.dims()
        ),
        _ => {}
    }
    on_cuda!(xs => super::linear_gpu::linear_forward(op, &dims, xs, weight, added));
    let _timer = op_timer::product(op, &dims, num_in, [xs.dtype(); 2]);
    ProductChoice::from_env()?;
    let arguments = [("xs", xs), ("weight", weight)];
    let [x, w] = HostFloats::of_one_dtype(op, arguments)?;
    let added_values = match added {
        Added::Nothing => None,
        Added::Bias(bias) => {
            let bias = HostFloats::new(op, "bias", bias)?;
            one_dtype(op, &[("xs", &x), ("bias", &bias)])?;
            Some(bias)
        }
        Added::Residual(residual) => {
            let residual = HostFloats::new(op, "residual", residual)?;
            one_dtype(op, &[("residual", &residual), ("xs", &x)])?;
            Some(residual)
        }
    };
    let is_bias = matches!(added, Added::Bias(_));
    Ok(by_float!(x.dtype(), T => {
        let (x, w) = (x.read_as::<T>(), w.read_as::<T>());
        let factors = Factors::new(
            Matrix::new(&x, rows, num_in, num_in),
            Matrix::new(&w, num_out, num_in, num_in).t(),
        );
        let size = ProductSize { rows, cols: num_out, num_k: num_in };
        let panels = packed.and_then(|packed| packed.panels(WeightUse::Forward, size, factors.rhs));
        let factors = Factors { panels: panels.as_deref(), ..factors };
        let y = with_addend(added_values.as_ref(), is_bias, |addend| {
            parallel_product::<T, T>(addend, &[factors])
        });
        OpOutput::of(y, dims)
    }))
}

/// Calls `then` with what is added to a product, a bias or values of its shape.
fn with_addend<T: Element, R>(
    added: Option<&HostFloats>,
    is_bias: bool,
    then: impl FnOnce(Addend<'_, T>) -> R,
) -> R {
    let Some(added) = added else {
        return then(Addend::Nothing);
    };
    let values = added.read_as::<T>();
    if is_bias {
        then(Addend::Bias(&widened(&values)))
    } else {
        then(Addend::Values(&values))
    }
}
