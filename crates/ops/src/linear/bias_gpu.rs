//! Sums over rows on the GPU: the gradient of a bias.

#![allow(unsafe_code)]

use super::linear_gpu::last_dim;
use crate::cuda::element::{Element, by_dtype};
use crate::cuda::gpu::{BLOCK, Gpu};
use crate::cuda::launch;
use crate::cuda::pointer::Out;
use crate::elementwise::elements_gpu::rounded;
use crate::host::values::detached;
use candle_core::{Result, Tensor};

/// Rows that are summed by one block before the sums are.
const ROWS_PER_SLICE: usize = 256;

/// The sum of `dy` over its rows, in its dtype.
pub(crate) fn linear_bias_grad(op: &'static str, dy: &Tensor) -> Result<Tensor> {
    let gpu = Gpu::of(op, dy)?;
    let (cols, dy) = (last_dim(dy), detached(dy)?);
    let db = gpu.alloc::<f32>(cols)?;
    by_dtype!(op, "dy", dy, T => sum::<T>(&gpu, db.out(), false, &dy, cols))?;
    rounded(&gpu, db, &dy, cols)
}

/// Writes, or adds if `add`, the sum of `dy` over its rows to `dst`, f32, of as many values as a row.
pub(crate) fn linear_bias_grad_into(
    op: &'static str,
    dst: &Tensor,
    add: bool,
    dy: &Tensor,
) -> Result<()> {
    let gpu = Gpu::of(op, dst)?;
    let (cols, dy) = (last_dim(dy), detached(dy)?);
    gpu.write::<f32>(
        "dst",
        dst,
        |dst| by_dtype!(op, "dy", dy, T => sum::<T>(&gpu, dst, add, &dy, cols)),
    )
}

/// `dst` has `cols` values, as each row of `dy`.
fn sum<T: Element>(gpu: &Gpu, dst: Out<f32>, add: bool, dy: &Tensor, cols: usize) -> Result<()> {
    if cols == 0 {
        return Ok(());
    }
    let rows = dy.elem_count() / cols;
    let num_slices = rows.div_ceil(ROWS_PER_SLICE).clamp(1, 65535);
    let dy = gpu.read::<T>("dy", dy)?;
    let partials = gpu.alloc::<f32>(num_slices * cols)?;
    let num_blocks = cols.div_ceil(32);
    let slices = gpu.grid([num_blocks, num_slices, 1], BLOCK, 1024)?;
    let last = gpu.blocks(num_blocks, BLOCK, 1024)?;
    let (sums, num_cols) = (partials.out(), cols as i64);
    // SAFETY: dy has rows of cols values, partials one for each slice, dst one; the launches follow each other.
    unsafe {
        launch::column_sum::<T>(&slices, sums, dy.get(), rows as i64, num_cols, 0)?;
        let sums = sums.read();
        launch::column_sum::<f32>(&last, dst, sums, num_slices as i64, num_cols, add.into())
    }
}
