//! Gradients of the linear layer, each by itself, for layers that communicate or do not train everything:
//! `dx = dy W`, `dW = dy^T x`, `db = sum over rows of dy`.

use super::weight::{LinearWeight, rows_of, weight_dims};
use crate::cpu::chunks::{SUMMED_ROWS, for_each_chunk, rows_per_partial, sum_partials};
use crate::cpu::element::{Element, by_float};
use crate::cpu::half_precision::add_values;
use crate::host::floats::HostFloats;
use crate::host::in_place::{len_must_be, write};
use crate::host::on_cuda::on_cuda;
use crate::host::op_output::OpOutput;
use crate::product::factors::Factors;
use crate::product::matrix::{Addend, Matrix, MatrixMut};
use crate::product::packed_weight::WeightUse;
use crate::product::products::parallel_product;
use crate::settings::product_choice::{ProductChoice, ProductSize};
use crate::timing::op_timer;
use candle_core::{DType, Result, Tensor, bail};

/// Gradient of the input: `dx = dy W`, outside any graph.
///
/// # Shapes
/// `dy (.., out)`, `weight (out, in)` -> `(.., in)`; one dtype.
///
/// # Errors
/// When the shapes do not fit or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn linear_input_grad(dy: &Tensor, weight: &Tensor) -> Result<Tensor> {
    LinearWeight::from(weight).input_grad(dy)
}

/// Gradient of the input of several linear layers: the sum of `dy W` over the terms `(dy, W)`, outside any graph.
///
/// # Shapes
/// Each `dy (.., out)` and `weight (out, in)`, with `in` and the leading dimensions in common -> `(.., in)`; one dtype.
///
/// # Errors
/// When there is no term, the shapes do not fit or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn linear_input_grad_sum(terms: &[(&Tensor, &Tensor)]) -> Result<Tensor> {
    let terms = terms.iter().map(|(dy, weight)| (*dy, (*weight).into()));
    LinearWeight::input_grad_sum(&terms.collect::<Vec<_>>())
}

impl LinearWeight<'_> {
    /// [`linear_input_grad`] of this weight.
    ///
    /// # Errors
    /// Those of [`linear_input_grad`].
    pub fn input_grad(self, dy: &Tensor) -> Result<Tensor> {
        input_grad("linear_input_grad", &[(dy, self)])
    }

    /// [`linear_input_grad_sum`] of such weights.
    ///
    /// # Errors
    /// Those of [`linear_input_grad_sum`].
    pub fn input_grad_sum(terms: &[(&Tensor, Self)]) -> Result<Tensor> {
        input_grad("linear_input_grad_sum", terms)
    }
}

fn input_grad(op: &'static str, weighted: &[(&Tensor, LinearWeight<'_>)]) -> Result<Tensor> {
    let Some((first, _)) = weighted.first() else {
        bail!("{op}: expected at least one term, got none")
    };
    let terms = weighted.iter().map(|(dy, weight)| (*dy, weight.values));
    let terms: &[(&Tensor, &Tensor)] = &terms.collect::<Vec<_>>();
    let dims = dims_of_sum(op, terms)?;
    on_cuda!(first => super::linear_gpu::linear_input_grad(op, &dims, terms));
    let all_out = terms.iter().map(|(_, weight)| weight.dims()[0]).sum();
    let _timer = op_timer::product(op, &dims, all_out, [first.dtype(); 2]);
    ProductChoice::from_env()?;
    let mut hosts = Vec::with_capacity(terms.len());
    for (dy, weight) in terms {
        let arguments = [("dy", *dy), ("weight", *weight)];
        hosts.push(HostFloats::of_one_dtype(op, arguments)?);
    }
    let rows = dims.iter().rev().skip(1).product();
    Ok(by_float!(first.dtype(), T => {
        let values = hosts.iter().map(|hosts| hosts.each_ref().map(HostFloats::read_as::<T>));
        let values: Vec<_> = values.collect();
        let factors = terms.iter().zip(&values).map(|((_, weight), [dy, weight_values])| {
            let (num_out, num_in) = weight_dims(op, weight)?;
            Ok(Factors::new(
                Matrix::new(dy, rows, num_out, num_out),
                Matrix::new(weight_values, num_out, num_in, num_in),
            ))
        });
        let mut factors: Vec<_> = factors.collect::<Result<_>>()?;
        let panels = weighted.iter().zip(&factors).map(|((_, weight), factors)| {
            let packed = weight.packed?;
            let size = ProductSize {
                rows,
                cols: factors.rhs.cols,
                num_k: all_out,
            };
            packed.panels(WeightUse::InputGrad, size, factors.rhs)
        });
        let panels: Vec<_> = panels.collect();
        for (factors, panels) in factors.iter_mut().zip(&panels) {
            factors.panels = panels.as_deref();
        }
        OpOutput::of(parallel_product::<T, T>(Addend::Nothing, &factors), dims).into_tensor()
    }))
}

/// The shape that all terms `dy W` have, at least one, all of one dtype.
fn dims_of_sum(op: &str, terms: &[(&Tensor, &Tensor)]) -> Result<Vec<usize>> {
    let (first, weight) = terms[0];
    let (num_out, num_in) = weight_dims(op, weight)?;
    let (_, leading) = rows_of(op, "dy", first, num_out)?;
    for (dy, weight) in terms {
        let (num_out, term_in) = weight_dims(op, weight)?;
        let (_, term_leading) = rows_of(op, "dy", dy, num_out)?;
        if dy.dtype() != first.dtype() {
            bail!(
                "{op}: the terms must have one dtype, got {:?} and {:?}",
                first.dtype(),
                dy.dtype()
            )
        }
        if term_in != num_in || term_leading != leading {
            bail!(
                "{op}: expected terms that add up to {leading:?} rows of {num_in}, got dy {:?} and weight {:?}",
                dy.dims(),
                weight.dims()
            )
        }
    }
    Ok([leading, &[num_in]].concat())
}

/// Gradient of the weight: `dW = dy^T x`, outside any graph.
///
/// # Shapes
/// `dy (.., out)`, `xs (.., in)` with the same leading dimensions -> `(out, in)`; one dtype.
///
/// # Errors
/// When the shapes do not fit or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn linear_weight_grad(dy: &Tensor, xs: &Tensor) -> Result<Tensor> {
    let op = "linear_weight_grad";
    let (rows, num_out, num_in) = rows_out_in(op, dy, xs)?;
    on_cuda!(dy => super::linear_gpu::linear_weight_grad(op, dy, xs));
    let _timer = op_timer::product(op, &[num_out, num_in], rows, [dy.dtype(); 2]);
    let [dy, xs] = dy_and_xs(op, dy, xs)?;
    Ok(by_float!(dy.dtype(), T => {
        let (dy, xs) = (dy.read_as::<T>(), xs.read_as::<T>());
        let factors = Factors::new(
            Matrix::new(&dy, rows, num_out, num_out).t(),
            Matrix::new(&xs, rows, num_in, num_in),
        );
        OpOutput::of(parallel_product::<T, T>(Addend::Nothing, &[factors]), (num_out, num_in)).into_tensor()
    }))
}

/// Writes, or adds if `add`, the gradient of the weight, `dy^T x`, to `dst`; outside any graph, without transposing
/// anything in memory.
///
/// # Shapes
/// `dst` the `out * in` values of the weight, row by row, f32; `dy (.., out)`, `xs (.., in)` with the same leading
/// dimensions; one dtype.
///
/// # Errors
/// When the shapes do not fit or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn linear_weight_grad_into(dst: &Tensor, add: bool, dy: &Tensor, xs: &Tensor) -> Result<()> {
    let op = "linear_weight_grad_into";
    let (rows, num_out, num_in) = rows_out_in(op, dy, xs)?;
    len_must_be(op, dst, num_out * num_in)?;
    on_cuda!(dst => super::linear_gpu::linear_weight_grad_into(op, dst, add, dy, xs));
    let dtypes = [dy.dtype(), DType::F32];
    let _timer = op_timer::product(op, &[num_out, num_in], rows, dtypes);
    let [dy, xs] = dy_and_xs(op, dy, xs)?;
    let addend = if add { Addend::Result } else { Addend::Nothing };
    by_float!(dy.dtype(), T => {
        let (dy, xs) = (dy.read_as::<T>(), xs.read_as::<T>());
        let factors = Factors::new(
            Matrix::new(&dy, rows, num_out, num_out).t(),
            Matrix::new(&xs, rows, num_in, num_in),
        );
        write::<f32>(op, "dst", dst, num_out * num_in, |dst| {
            MatrixMut::new(dst, num_out, num_in, num_in).parallel_product(addend, &[factors]);
        })
    })
}

/// Gradient of the bias: the sum of `dy` over its rows, outside any graph.
///
/// # Shapes
/// `dy (.., out)` -> `(out)`, of its dtype.
///
/// # Errors
/// When `dy` has no dimension or is not f32, bf16 or f16.
pub fn linear_bias_grad(dy: &Tensor) -> Result<Tensor> {
    let op = "linear_bias_grad";
    let num_out = bias_len(op, dy)?;
    on_cuda!(dy => super::bias_gpu::linear_bias_grad(op, dy));
    let _timer = op_timer::op(op);
    let mut db = vec![0f32; num_out];
    sum_rows(&mut db, true, &HostFloats::new(op, "dy", dy)?);
    Ok(OpOutput::rounded(db, dy.dtype(), num_out).into_tensor())
}

/// Writes, or adds if `add`, the gradient of the bias, the sum of `dy` over its rows, to `dst`; outside any graph.
///
/// # Shapes
/// `dst` the `out` values of the bias, f32; `dy (.., out)`.
///
/// # Errors
/// When the shapes do not fit or `dy` is not f32, bf16 or f16.
pub fn linear_bias_grad_into(dst: &Tensor, add: bool, dy: &Tensor) -> Result<()> {
    let op = "linear_bias_grad_into";
    let num_out = bias_len(op, dy)?;
    len_must_be(op, dst, num_out)?;
    on_cuda!(dst => super::bias_gpu::linear_bias_grad_into(op, dst, add, dy));
    let _timer = op_timer::op(op);
    let dy = HostFloats::new(op, "dy", dy)?;
    write(op, "dst", dst, num_out, |dst: &mut [f32]| {
        sum_rows(dst, add, &dy)
    })
}

/// `out` of a gradient `dy (.., out)`.
fn bias_len(op: &str, dy: &Tensor) -> Result<usize> {
    match dy.dims() {
        [.., num_out] => Ok(*num_out),
        [] => bail!("{op}: expected dy (.., out), got a scalar"),
    }
}

/// Writes, or adds if `add`, the sum of rows as long as `dst`.
fn sum_rows(dst: &mut [f32], add: bool, dy: &HostFloats) {
    by_float!(dy.dtype(), T => sum_rows_of::<T>(dst, add, &dy.read_as()));
}

fn sum_rows_of<T: Element>(dst: &mut [f32], add: bool, values: &[T]) {
    let num_out = dst.len();
    let rows = rows_per_partial(values.len() / num_out.max(1), num_out);
    let mut partials = vec![0f32; values.len().div_ceil((rows * num_out).max(1)) * num_out];
    for_each_chunk(&mut partials, num_out, values.len(), |chunk, sum| {
        let chunk = values.chunks(rows * num_out).nth(chunk).unwrap_or_default();
        let mut block_sum = vec![0f32; num_out];
        for block in chunk.chunks(SUMMED_ROWS * num_out) {
            for dy in block.chunks_exact(num_out) {
                add_values(&mut block_sum, dy);
            }
            for (sum, block_sum) in sum.iter_mut().zip(&mut block_sum) {
                *sum += std::mem::take(block_sum);
            }
        }
    });
    sum_partials(dst, add, &partials);
}

fn dy_and_xs(op: &str, dy: &Tensor, xs: &Tensor) -> Result<[HostFloats; 2]> {
    ProductChoice::from_env()?;
    HostFloats::of_one_dtype(op, [("dy", dy), ("xs", xs)])
}

/// Rows, `out` and `in` of gradients and inputs that fit.
fn rows_out_in(op: &str, dy: &Tensor, xs: &Tensor) -> Result<(usize, usize, usize)> {
    match (dy.dims(), xs.dims()) {
        ([dy_leading @ .., num_out], [xs_leading @ .., num_in]) if dy_leading == xs_leading => {
            Ok((dy_leading.iter().product(), *num_out, *num_in))
        }
        (dy, xs) => bail!(
            "{op}: expected dy (.., out) and xs (.., in) with the same leading dimensions, got dy {dy:?} and xs {xs:?}"
        ),
    }
}
