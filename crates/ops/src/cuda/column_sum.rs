//! Sums over rows on the GPU: the gradient of a bias.

use super::launch;
use super::values::{BLOCK, Element, Gpu, by_dtype};
use candle_core::{Result, Tensor, bail};

const NAME: &str = "linear_bias_grad_into";

/// Rows that are summed by one block before the sums are.
const ROWS_PER_SLICE: usize = 256;

/// Writes, or adds if `add`, the sum of `dy` over its rows to `dst`.
///
/// # Shapes
/// `dst` of `out` values, f32; `dy (.., out)` f32 or bf16.
///
/// # Errors
/// When the shapes or dtypes do not fit, or a tensor is not on the same GPU.
pub fn linear_bias_grad_into(dst: &Tensor, add: bool, dy: &Tensor) -> Result<()> {
    let dy = dy.contiguous()?;
    by_dtype!(NAME, dy.dtype(), T => sum::<T>(dst, add, &dy))
}

fn sum<T: Element>(dst: &Tensor, add: bool, dy: &Tensor) -> Result<()> {
    let gpu = Gpu::of(NAME, dst)?;
    let cols = dst.elem_count();
    if dy.dims().last() != Some(&cols) {
        bail!(
            "{NAME}: expected a gradient (.., {cols}), got {:?}",
            dy.dims()
        )
    }
    if cols == 0 {
        return Ok(());
    }
    let rows = dy.elem_count() / cols;
    let num_slices = rows.div_ceil(ROWS_PER_SLICE).clamp(1, 65535);
    let dy = gpu.read::<T>("the gradient", dy)?;
    let partials = gpu.alloc::<f32>(num_slices * cols)?;
    let num_blocks = cols.div_ceil(32);
    let slices = gpu.grid([num_blocks, num_slices, 1], BLOCK, 1024)?;
    let last = gpu.blocks(num_blocks, BLOCK, 1024)?;
    gpu.write::<f32>("the buffer", dst, |dst| {
        let (sums, num_cols) = (partials.out(), cols as i64);
        // SAFETY: dy has rows of cols values, partials one for each slice, dst one; the launches follow each other.
        unsafe {
            launch::column_sum::<T>(&slices, sums, dy.get(), rows as i64, num_cols, 0)?;
            let sums = sums.read();
            launch::column_sum::<f32>(&last, dst, sums, num_slices as i64, num_cols, add.into())
        }
    })
}
