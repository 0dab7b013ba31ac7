//! Linear layers on the GPU by cuBLAS: `y = x W^T`, `dx = dy W` and `dW += dy^T x`, products of f32 or bf16 summed in f32.
//!
//! cuBLAS counts along columns, so a matrix of rows is its own transpose to it: each product below is asked for as the
//! transpose of what the equation says.

use super::pointer::{In, Out};
use super::values::{Element, Gpu, by_dtype, dims_must_be};
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::cublas::{result, sys};
use candle_core::{DType, Result, Tensor, bail};
use std::ffi::c_int;

/// `xs W^T`, plus `added` if there is one (a bias or a residual), rounded once; outside any graph.
///
/// # Shapes
/// `xs (.., in)`, `weight (out, in)`, `added` something that broadcasts to `(.., out)` -> `(.., out)`; one dtype.
///
/// # Errors
/// When the shapes or dtypes do not fit, or a tensor is not on the same GPU.
pub fn linear_forward(xs: &Tensor, weight: &Tensor, added: Option<&Tensor>) -> Result<Tensor> {
    let op = "linear";
    let (num_out, num_in) = weight.dims2()?;
    let (rows, leading) = rows_of(op, "xs", xs, num_in)?;
    let dims = [leading, &[num_out]].concat();
    product(
        op,
        &dims,
        added,
        xs,
        weight,
        Product {
            transposed: [true, false],
            sizes: [num_out, rows, num_in],
            strides: [num_in, num_in, num_out],
        },
    )
}

/// Gradient of the input, `dy W`, plus `added` if there is one: the gradient along another path; outside any graph.
///
/// # Shapes
/// `dy (.., out)`, `weight (out, in)`, `added (.., in)` -> `(.., in)`; one dtype.
///
/// # Errors
/// When the shapes or dtypes do not fit, or a tensor is not on the same GPU.
pub fn linear_input_grad(dy: &Tensor, weight: &Tensor, added: Option<&Tensor>) -> Result<Tensor> {
    let op = "linear_input_grad";
    let (num_out, num_in) = weight.dims2()?;
    let (rows, leading) = rows_of(op, "dy", dy, num_out)?;
    let dims = [leading, &[num_in]].concat();
    product(
        op,
        &dims,
        added,
        dy,
        weight,
        Product {
            transposed: [false, false],
            sizes: [num_in, rows, num_out],
            strides: [num_in, num_out, num_in],
        },
    )
}

/// Writes, or adds if `add`, the gradient of the weight, `dy^T x`, to an f32 buffer; outside any graph.
///
/// # Shapes
/// `dst` the `out * in` values of the weight, row by row, f32; `dy (.., out)`, `xs (.., in)` of one dtype.
///
/// # Errors
/// When the shapes or dtypes do not fit, or a tensor is not on the same GPU.
pub fn linear_weight_grad_into(dst: &Tensor, add: bool, dy: &Tensor, xs: &Tensor) -> Result<()> {
    let op = "linear_weight_grad_into";
    let (dy, xs) = (dy.contiguous()?, xs.contiguous()?);
    by_dtype!(op, xs.dtype(), T => weight_grad::<T>(op, dst, add, &dy, &xs))
}

fn weight_grad<T: Element>(
    op: &'static str,
    dst: &Tensor,
    add: bool,
    dy: &Tensor,
    xs: &Tensor,
) -> Result<()> {
    let gpu = Gpu::of(op, dst)?;
    let [num_out, num_in] = [dy, xs].map(|tensor| tensor.dims().last().copied().unwrap_or(1));
    let (rows, leading) = rows_of(op, "dy", dy, num_out)?;
    dims_must_be(op, "xs", xs, &[leading, &[num_in]].concat())?;
    if dst.elem_count() != num_out * num_in {
        bail!(
            "{op}: expected a buffer of {num_out} x {num_in} values, got {}",
            dst.elem_count()
        )
    }
    let (dy, xs) = (gpu.read::<T>("dy", dy)?, gpu.read::<T>("xs", xs)?);
    let product = Product {
        transposed: [false, true],
        sizes: [num_in, num_out, rows],
        strides: [num_in, num_out, num_in],
    };
    gpu.write::<f32>("the buffer", dst, |dst| {
        // SAFETY: xs has rows * in values, dy rows * out and dst out * in.
        unsafe { product.run::<T, f32>(&gpu, xs.get(), dy.get(), dst, add) }
    })
}

/// The product of `xs` and `weight` as rows of `dims`, onto a copy of `added`.
fn product(
    op: &'static str,
    dims: &[usize],
    added: Option<&Tensor>,
    xs: &Tensor,
    weight: &Tensor,
    product: Product,
) -> Result<Tensor> {
    let (xs, weight) = (xs.contiguous()?, weight.contiguous()?);
    by_dtype!(op, xs.dtype(), T => {
        let gpu = Gpu::of(op, &xs)?;
        let (x, w) = (gpu.read::<T>("xs", &xs)?, gpu.read::<T>("weight", &weight)?);
        let y = match added {
            Some(added) => added.detach().broadcast_as(dims)?.force_contiguous()?,
            None => gpu.alloc::<T>(dims.iter().product())?.into_tensor(dims),
        };
        gpu.write::<T>("the result", &y, |y| {
            // SAFETY: sizes and strides are those of the shapes, which the callers checked.
            unsafe { product.run::<T, T>(&gpu, w.get(), x.get(), y, added.is_some()) }
        })?;
        Ok(y)
    })
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
        let [m, n, k] = self.sizes.map(|size| gpu.i32(size));
        let [stride_a, stride_b, stride_c] = self.strides.map(|stride| gpu.i32(stride.max(1)));
        let (alpha, beta) = (1f32, if add { 1f32 } else { 0f32 });
        let (m, n, k): (c_int, c_int, c_int) = (m?, n?, k?);
        let blas = gpu.device.cublas_handle();
        // SAFETY: the handle is the device's, on its stream; alpha and beta are read during the call; the matrices are as
        // the caller promised.
        unsafe {
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
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
        }
        .w()
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
        _ => sys::cudaDataType::CUDA_R_32F,
    }
}

fn rows_of<'a>(
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
