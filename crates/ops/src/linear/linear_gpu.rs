//! Linear layers on the GPU by cuBLAS: `y = x W^T`, `dx = dy W` and `dW += dy^T x`, products of f32, bf16 or f16 summed in f32;
//! shapes are checked by the crate's `linear` and `linear_grad`.
//!
//! cuBLAS counts along columns, so a matrix of rows is its own transpose to it: each product below is asked for as the
//! transpose of what the equation says.

#![allow(unsafe_code)]

use super::weight::Added;
use crate::cuda::element::{Element, by_dtype};
use crate::cuda::gpu::{BLOCK, Gpu};
use crate::cuda::launch;
use crate::cuda::pointer::{In, Out};
use crate::cuda::profile::timed;
use crate::cuda::values::Fresh;
use crate::elementwise::elements_gpu::zero;
use crate::host::op_output::OpOutput;
use crate::host::values::detached;
use crate::settings::matmul_precision::MatmulPrecision;
use crate::timing::op_times::OpName;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::cublas::{result, sys};
use candle_core::{DType, Result, Tensor};
use std::ffi::c_int;

/// `xs W^T` and what is added, of shape `dims`.
pub(crate) fn linear_forward(
    op: &'static str,
    dims: &[usize],
    xs: &Tensor,
    weight: &Tensor,
    added: Added<'_>,
) -> Result<OpOutput> {
    let (xs, weight) = (detached(xs)?, detached(weight)?);
    let (num_out, num_in) = weight.dims2()?;
    let product = Product {
        transposed: [true, false],
        sizes: [num_out, rows_of(&xs), num_in],
        strides: [num_in, num_in, num_out],
    };
    let add = !matches!(added, Added::Nothing);
    by_dtype!(op, "xs", xs, T => {
        let gpu = Gpu::of(op, &xs)?;
        let y = start::<T>(&gpu, dims, added)?;
        let (x, w) = (gpu.read::<T>("xs", &xs)?, gpu.read::<T>("weight", &weight)?);
        // SAFETY: w has out * in values, x rows * in and y rows * out.
        unsafe { product.run::<T, T>(&gpu, w.get(), x.get(), y.out(), add) }?;
        Ok(y.into_output(dims))
    })
}

/// Memory for the result, with what is added.
fn start<T: Element>(gpu: &Gpu, dims: &[usize], added: Added<'_>) -> Result<Fresh<T>> {
    let len = dims.iter().product();
    let y = gpu.alloc::<T>(len)?;
    match added {
        _ if len == 0 => (),
        Added::Nothing => (),
        Added::Residual(residual) => {
            let residual = detached(residual)?;
            let residual = gpu.read::<T>("residual", &residual)?;
            // SAFETY: both have len values.
            unsafe { gpu.copy(y.out(), residual.get(), len) }?;
        }
        Added::Bias(bias) => {
            let bias = detached(bias)?;
            let cols = bias.elem_count();
            let bias = gpu.read::<T>("bias", &bias)?;
            let launch = gpu.rows(len / cols, BLOCK, 0)?;
            let (rows, cols) = ((len / cols) as i64, cols as i64);
            // SAFETY: y has rows of cols values, bias has cols.
            unsafe { launch::fill_rows::<T>(&launch, y.out(), bias.get(), rows, cols) }?;
        }
    }
    Ok(y)
}

/// The sum of `dy W` over the terms `(dy, W)`, at least one, rounded after each, of shape `dims`.
pub(crate) fn linear_input_grad(
    op: &'static str,
    dims: &[usize],
    terms: &[(&Tensor, &Tensor)],
) -> Result<Tensor> {
    let (first, _) = terms[0];
    by_dtype!(op, "dy", first, T => {
        let gpu = Gpu::of(op, first)?;
        let dx = gpu.alloc::<T>(dims.iter().product())?;
        for (i, (dy, weight)) in terms.iter().enumerate() {
            let (dy, weight) = (detached(dy)?, detached(weight)?);
            let (num_out, num_in) = weight.dims2()?;
            let product = Product {
                transposed: [false, false],
                sizes: [num_in, rows_of(&dy), num_out],
                strides: [num_in, num_out, num_in],
            };
            let (dy, w) = (gpu.read::<T>("dy", &dy)?, gpu.read::<T>("weight", &weight)?);
            // SAFETY: w has out * in values, dy rows * out and dx rows * in.
            unsafe { product.run::<T, T>(&gpu, w.get(), dy.get(), dx.out(), i > 0) }?;
        }
        Ok(dx.into_tensor(dims))
    })
}

/// `dy^T x` of shape `(out, in)` in their dtype.
pub(crate) fn linear_weight_grad(op: &'static str, dy: &Tensor, xs: &Tensor) -> Result<Tensor> {
    let (dy, xs) = (detached(dy)?, detached(xs)?);
    let shape = (last_dim(&dy), last_dim(&xs));
    by_dtype!(op, "dy", dy, T => {
        let gpu = Gpu::of(op, &dy)?;
        let dw = gpu.alloc::<T>(shape.0 * shape.1)?;
        weight_grad::<T, T>(&gpu, dw.out(), false, &dy, &xs)?;
        Ok(dw.into_tensor(shape))
    })
}

/// Writes, or adds if `add`, `dy^T x` to `dst`, f32, of `out * in` values.
pub(crate) fn linear_weight_grad_into(
    op: &'static str,
    dst: &Tensor,
    add: bool,
    dy: &Tensor,
    xs: &Tensor,
) -> Result<()> {
    let gpu = Gpu::of(op, dst)?;
    let (dy, xs) = (detached(dy)?, detached(xs)?);
    gpu.write::<f32>(
        "dst",
        dst,
        |dst| by_dtype!(op, "dy", dy, T => weight_grad::<T, f32>(&gpu, dst, add, &dy, &xs)),
    )
}

/// `dw` has a row of `in` values for each of the `out` of `dy`.
fn weight_grad<T: Element, C: Element>(
    gpu: &Gpu,
    dw: Out<C>,
    add: bool,
    dy: &Tensor,
    xs: &Tensor,
) -> Result<()> {
    let (num_out, num_in, rows) = (last_dim(dy), last_dim(xs), rows_of(dy));
    let (dy, xs) = (gpu.read::<T>("dy", dy)?, gpu.read::<T>("xs", xs)?);
    let product = Product {
        transposed: [false, true],
        sizes: [num_in, num_out, rows],
        strides: [num_in, num_out, num_in],
    };
    // SAFETY: xs has rows * in values, dy rows * out and dw out * in.
    unsafe { product.run::<T, C>(gpu, xs.get(), dy.get(), dw, add) }
}

/// `c = a b + add c` as cuBLAS counts, along columns: `a (m, k)`, `b (k, n)`, `c (m, n)`.
struct Product {
    /// Whether a and b are stored transposed.
    transposed: [bool; 2],
    /// m, n and k.
    sizes: [usize; 3],
    /// Values from one column to the next of a, b and c.
    strides: [usize; 3],
}

impl Product {
    /// Puts the product on the GPU's stream.
    ///
    /// # Safety
    /// a, b and c must hold as many values as the sizes and strides say.
    unsafe fn run<T: Element, C: Element>(
        &self,
        gpu: &Gpu,
        a: In<T>,
        b: In<T>,
        c: Out<C>,
        add: bool,
    ) -> Result<()> {
        let [m, n, k] = self.sizes;
        if m * n == 0 || k == 0 && add {
            return Ok(());
        }
        if k == 0 {
            // SAFETY: c has m * n values, sums of no terms.
            return unsafe { zero(gpu, c, m * n) };
        }
        let [m, n, k] = self.sizes.map(|size| gpu.i32(size));
        let [stride_a, stride_b, stride_c] = self.strides.map(|stride| gpu.i32(stride.max(1)));
        let (alpha, beta) = (1f32, if add { 1f32 } else { 0f32 });
        let (m, n, k): (c_int, c_int, c_int) = (m?, n?, k?);
        let blas = gpu.device.cublas_handle();
        let name = OpName::Product(gpu.op(), self.sizes, [T::DTYPE, C::DTYPE]);
        // SAFETY: the handle is the device's, on its stream; alpha and beta are read during the call; the matrices are as
        // the caller promised.
        let done = timed(name, &gpu.device.cuda_stream(), || unsafe {
            result::gemm_ex(
                *blas.handle(),
                operation(self.transposed[0]),
                operation(self.transposed[1]),
                m,
                n,
                k,
                (&raw const alpha).cast(),
                a.address() as *const _,
                data_type::<T>(),
                stride_a?,
                b.address() as *const _,
                data_type::<T>(),
                stride_b?,
                (&raw const beta).cast(),
                c.address() as *mut _,
                data_type::<C>(),
                stride_c?,
                compute_type::<T>(),
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
            .w()
        });
        done.map_err(|err| {
            err.context(format!(
                "{}: cuBLAS, a product of {m} x {k} x {n}",
                gpu.op()
            ))
        })
    }
}

fn operation(transposed: bool) -> sys::cublasOperation_t {
    match transposed {
        true => sys::cublasOperation_t::CUBLAS_OP_T,
        false => sys::cublasOperation_t::CUBLAS_OP_N,
    }
}

fn data_type<T: Element>() -> sys::cudaDataType {
    match T::DTYPE {
        DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
        DType::F16 => sys::cudaDataType::CUDA_R_16F,
        _ => sys::cudaDataType::CUDA_R_32F,
    }
}

/// How f32 are multiplied is the process's choice; sums are f32.
fn compute_type<T: Element>() -> sys::cublasComputeType_t {
    match (T::DTYPE, MatmulPrecision::get()) {
        (DType::F32, MatmulPrecision::High) => {
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32
        }
        _ => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
    }
}

pub(super) fn last_dim(tensor: &Tensor) -> usize {
    tensor.dims().last().copied().unwrap_or(1)
}

/// Rows of the last dimension.
fn rows_of(tensor: &Tensor) -> usize {
    match tensor.dims() {
        [leading @ .., _] => leading.iter().product(),
        [] => 1,
    }
}
