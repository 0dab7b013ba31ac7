//! Blockwise int8 and int4 on the GPU.

#![allow(unsafe_code)]

use super::quantized::QuantizedType;
use crate::cuda::element::by_dtype;
use crate::cuda::gpu::{BLOCK, Gpu, MAX_BLOCKS_Y};
use crate::cuda::launch;
use crate::cuda::launch::Launch;
use crate::host::values::detached;
use candle_core::{Result, Tensor};

/// Values of a row for each block of threads: 8 for each thread.
const VALUES_PER_BLOCK: usize = 2048;

/// The packed form of the rows of `xs (a, b, len)`, those of `(b, a)`, in `shape`.
pub(crate) fn quantize_rows(
    op: &'static str,
    xs: &Tensor,
    to: QuantizedType,
    [a, b, len]: [usize; 3],
    shape: Vec<usize>,
) -> Result<Tensor> {
    let (gpu, rows) = (Gpu::of(op, xs)?, a * b);
    let xs = detached(xs)?;
    let packed = gpu.alloc::<u8>(rows * to.row_bytes(len))?;
    by_dtype!(gpu.op(), "xs", xs, T => if rows * len > 0 {
        let src = gpu.read::<T>("xs", &xs)?;
        let (grid, [a, b, len]) = (grid(&gpu, rows, len)?, [a, b, len].map(|len| len as i64));
        let launch = match to {
            QuantizedType::Int8 => launch::quantize_int8::<T>,
            QuantizedType::Int4 => launch::quantize_int4::<T>,
        };
        // SAFETY: xs has a * b rows of len values, packed the bytes of as many rows, from an aligned address.
        unsafe { launch(&grid, packed.out(), src.get(), a, b, len) }?;
    });
    Ok(packed.into_tensor(shape))
}

/// Each row of `len` values of `dst`, which has some, gets the sum of its row of each of `num_summed` summands, which `packed` has one after
/// the other.
pub(crate) fn dequantize_rows(
    op: &'static str,
    dst: &Tensor,
    add: bool,
    packed: &Tensor,
    from: QuantizedType,
    [num_summed, len]: [usize; 2],
) -> Result<()> {
    let gpu = Gpu::of(op, dst)?;
    let packed = detached(packed)?;
    let packed = gpu.read::<u8>("packed", &packed)?;
    let rows = dst.elem_count() / len;
    let grid = grid(&gpu, rows, len)?;
    let (rows, num_summed, len) = (rows as i64, num_summed as i64, len as i64);
    by_dtype!(op, "dst", dst, T => gpu.write::<T>("dst", dst, |dst| {
        let launch = match from {
            QuantizedType::Int8 => launch::dequantize_int8::<T>,
            QuantizedType::Int4 => launch::dequantize_int4::<T>,
        };
        // SAFETY: dst has rows of len values, packed the bytes of num_summed rows for each.
        unsafe { launch(&grid, dst, packed.get(), rows, num_summed, len, add.into()) }
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
