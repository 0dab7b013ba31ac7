//! Blockwise int8 on the GPU.

use super::element::by_dtype;
use super::gpu::{BLOCK, Gpu, MAX_BLOCKS_Y};
use super::launch::{self, Launch};
use crate::host::detached;
use crate::quantized::quantized_bytes;
use candle_core::{Result, Tensor};

/// Values of a row for each block of threads: 8 for each thread.
const VALUES_PER_BLOCK: usize = 2048;

/// The packed form of `xs`, rows of `len` values, in `shape`.
pub(crate) fn quantize_int8(
    xs: &Tensor,
    [rows, len]: [usize; 2],
    shape: Vec<usize>,
) -> Result<Tensor> {
    let gpu = Gpu::of("quantize_int8", xs)?;
    let xs = detached(xs)?;
    let packed = gpu.alloc_u8(rows * quantized_bytes(len))?;
    by_dtype!(gpu.op(), "xs", xs, T => if rows * len > 0 {
        let src = gpu.read::<T>("xs", &xs)?;
        let (launch, rows, len) = (grid(&gpu, rows, len)?, rows as i64, len as i64);
        // SAFETY: xs has rows of len values, packed the bytes of as many rows, from an aligned address.
        unsafe { launch::quantize_int8::<T>(&launch, packed.out(), src.get(), rows, len) }?;
    });
    Ok(packed.into_tensor(shape))
}

/// Each row of `len` values of `dst`, which has some, gets the sum of the next `num_summed` rows of `packed`, which has as many.
pub(crate) fn dequantize_int8(
    op: &'static str,
    dst: &Tensor,
    add: bool,
    packed: &Tensor,
    [num_summed, len]: [usize; 2],
) -> Result<()> {
    let gpu = Gpu::of(op, dst)?;
    let packed = detached(packed)?;
    let packed = gpu.read::<u8>("packed", &packed)?;
    let rows = dst.elem_count() / len;
    let launch = grid(&gpu, rows, len)?;
    let (rows, num_summed, len) = (rows as i64, num_summed as i64, len as i64);
    by_dtype!(op, "dst", dst, T => gpu.write::<T>("dst", dst, |dst| {
        // SAFETY: dst has rows of len values, packed the bytes of num_summed rows for each.
        unsafe { launch::dequantize_int8::<T>(&launch, dst, packed.get(), rows, num_summed, len, add.into()) }
    }))
}

/// Blocks along a row, and rows, or as many as a grid can have: a block takes several in turns then.
fn grid(gpu: &Gpu, rows: usize, len: usize) -> Result<Launch> {
    gpu.grid(
        [len.div_ceil(VALUES_PER_BLOCK), rows.min(MAX_BLOCKS_Y), 1],
        BLOCK,
        0,
    )
}
