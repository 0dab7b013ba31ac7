//! Products of large matrices with AVX-512 and AMX: blocks that fit the caches, packed in the order in which they are read, and a
//! tile of sums in registers (Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", ACM TOMS 34, 2008).
//!
//! bf16 are multiplied in pairs by `tdpbf16ps` (AMX) or `vdpbf16ps` (AVX512-BF16) where the processor has them; else they are widened
//! while they are packed, as f16 are. On processors without AVX-512 the `gemm` crate does all products ([`crate::product::products`]).
//! The example `bench_product` of this crate prints speeds.
//!
//! All sums are f32. An element is summed over `k` in the same blocks, in order, whatever tile or thread it belongs to: the
//! bits are the same for any number of threads, on all machines with the same instructions.

use super::blocks::multiply;
use super::factors::Factors;
use super::kernel::Kernel;
use super::matrix::{Addend, Matrix, MatrixMut};
use super::panels::Panels;
use crate::cpu::element::Element;
use crate::cpu::lines::Line;
use crate::cpu::processor::has_avx512;
use crate::settings::matmul_precision::MatmulPrecision;
use crate::settings::product_choice::{ProductChoice, ProductSize};
use candle_core::DType;
use std::sync::Arc;

/// With fewer rows or columns than this, tiles are mostly empty.
const MIN_EXTENT: usize = 28;

/// Whether [`product`] can be used, and should be, for a result of `rows` by `cols`.
pub(crate) fn is_worth_it<T: Element>(rows: usize, cols: usize) -> bool {
    rows >= MIN_EXTENT
        && cols >= MIN_EXTENT
        && instructions::<T>(ANY_SIZE, MatmulPrecision::get()).is_some()
}

/// Of a product whose matrices take no time beside the multiplications.
pub(crate) const ANY_SIZE: ProductSize = ProductSize {
    rows: usize::MAX,
    cols: usize::MAX,
    num_k: usize::MAX,
};

/// The size of the products for which there is room for the panels of a right matrix of so many columns: those that read the largest ones.
fn with_most_panels(cols: usize) -> ProductSize {
    ProductSize { cols, ..ANY_SIZE }
}

/// `out = addend + sum of lhs * rhs`, on all threads of the current pool if that is worth it.
///
/// # Safety
/// [`is_worth_it`], the shapes fit, there is at least one value along `k`, and nobody else uses the elements of `out` meanwhile.
pub(crate) unsafe fn product<T: Element, Out: Element>(
    out: &MatrixMut<'_, Out>,
    addend: Addend<'_, Out>,
    factors: &[Factors<'_, T>],
) {
    let size = ProductSize {
        rows: out.rows,
        cols: out.cols,
        num_k: factors.iter().map(|factors| factors.lhs.cols).sum(),
    };
    let precision = MatmulPrecision::get();
    // SAFETY: the processor has what the kernel needs, the rest as promised by the caller.
    unsafe { with_kernel!(T, size, precision, K => multiply::<K, T, Out>(out, addend, factors)) };
}

/// Memory for the panels of a right matrix (k, cols) of values of `T`, of which none is written; `None` if no product here reads such panels.
pub(crate) fn new_panels<T: Element>(num_k: usize, cols: usize) -> Option<Panels> {
    panel_bytes::<T>(num_k, cols)?;
    let mut panels = None;
    let size = with_most_panels(cols);
    with_kernel!(T, size, MatmulPrecision::get(), K => panels = Some(Panels::new::<K>(num_k, cols)));
    panels
}

/// Bytes of these panels.
pub(crate) fn panel_bytes<T: Element>(num_k: usize, cols: usize) -> Option<usize> {
    if num_k == 0 || !is_worth_it::<T>(MIN_EXTENT, cols) {
        return None;
    }
    let mut num_lines = 0;
    let size = with_most_panels(cols);
    with_kernel!(T, size, MatmulPrecision::get(), K => num_lines = Panels::num_lines::<K>(num_k, cols));
    Some(num_lines * size_of::<Line>())
}

/// Writes the panels of a right matrix for a product of this size that [is worth it](is_worth_it), which may be of more values along `k`; if they are not those
/// already that it reads.
pub(crate) fn fill_panels<T: Element>(
    panels: &mut Arc<Panels>,
    is_filled: bool,
    matrix: Matrix<'_, T>,
    size: ProductSize,
) {
    let precision = MatmulPrecision::get();
    // SAFETY: the processor has what the kernel needs.
    unsafe { with_kernel!(T, size, precision, K => fill::<K, T>(panels, is_filled, matrix)) };
}

/// # Safety
/// The processor has what the kernel needs.
unsafe fn fill<K: Kernel, T: Element>(
    panels: &mut Arc<Panels>,
    is_filled: bool,
    matrix: Matrix<'_, T>,
) {
    let (num_k, cols) = (matrix.rows, matrix.cols);
    if is_filled && panels.fit::<K>(num_k, cols) {
        return;
    }
    // A product may still read the old ones; those of the kernels that need most have room for those of the others.
    if !Arc::get_mut(panels).is_some_and(|panels| panels.reuse::<K>(num_k, cols)) {
        *panels = Arc::new(Panels::new::<K>(num_k, cols));
    }
    if let Some(panels) = Arc::get_mut(panels) {
        // SAFETY: as promised by the caller.
        unsafe { panels.pack::<K, T>(matrix) };
    }
}

/// The kernels, by what they multiply with.
pub(crate) enum Instructions {
    MultiplyAdds,
    Dots,
    Tiles,
    TilesOfTwoParts,
    TilesOfThreeParts,
}

/// Those for values of `T`: chosen by the environment or the best; none if there is nothing here for them.
pub(crate) fn instructions<T: Element>(
    size: ProductSize,
    precision: MatmulPrecision,
) -> Option<Instructions> {
    use ProductChoice::{Dots, ThreeParts, TwoParts};
    let fastest = || match T::DTYPE {
        DType::F32 => ProductChoice::fastest(size, precision),
        _ => ProductChoice::fastest(ANY_SIZE, precision),
    };
    // A choice that means nothing was an error of the operation, before it came here.
    let chosen = ProductChoice::from_env().ok().flatten();
    match (T::DTYPE, chosen.unwrap_or_else(fastest)) {
        (DType::BF16, TwoParts | ThreeParts) => Some(Instructions::Tiles),
        (DType::F32, TwoParts) => Some(Instructions::TilesOfTwoParts),
        (DType::F32, ThreeParts) => Some(Instructions::TilesOfThreeParts),
        (DType::BF16, Dots) => Some(Instructions::Dots),
        _ => has_avx512().then_some(Instructions::MultiplyAdds),
    }
}

/// Evaluates an expression with `$k` being the kernel for a product of this size of values of `$t`, if there is one.
macro_rules! with_kernel {
    ($t:ty, $size:expr, $precision:expr, $k:ident => $expression:expr) => {{
        use $crate::product::amx::Amx;
        use $crate::product::kernels::{Instructions, instructions};
        use $crate::product::registers::{Dots, MultiplyAdds};
        macro_rules! with {
            ($kernel:ty) => {{
                type $k = $kernel;
                $expression
            }};
        }
        match instructions::<$t>($size, $precision) {
            None => {}
            Some(Instructions::MultiplyAdds) => with!(MultiplyAdds),
            Some(Instructions::Dots) => with!(Dots),
            Some(Instructions::Tiles) => with!(Amx<1>),
            Some(Instructions::TilesOfTwoParts) => with!(Amx<2>),
            Some(Instructions::TilesOfThreeParts) => with!(Amx<3>),
        }
    }};
}
pub(crate) use with_kernel;

#[cfg(test)]
#[path = "../../tests/product/kernels.rs"]
mod tests;
