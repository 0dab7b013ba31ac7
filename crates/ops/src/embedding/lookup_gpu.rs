//! Rows of a table, and the gradient of the table, on the GPU; the crate's `embedding` checks the shapes. The gradient is summed in the order of the positions: rows
//! are sorted first, then each is added up by one block.

#![allow(unsafe_code)]

use super::lookup::NAME;
use super::order_gpu::Order;
use crate::cuda::element::{Element, by_dtype};
use crate::cuda::gpu::{BLOCK, Gpu};
use crate::cuda::launch;
use crate::cuda::pointer::Out;
use crate::elementwise::elements_gpu::{rounded, zero};
use crate::host::op_output::OpOutput;
use crate::host::values::detached;
use candle_core::{Result, Tensor};

/// The table's row for each id, of shape `(ids.., h)`; zeros for ids that are no row.
pub(crate) fn embedding_forward(table: &Tensor, ids: &Tensor) -> Result<OpOutput> {
    let gpu = Gpu::of(NAME, table)?;
    let (local_vocab, hidden) = table.dims2()?;
    let num_ids = ids.elem_count();
    let dims = [ids.dims(), &[hidden]].concat();
    let (table, ids) = (detached(table)?, detached(ids)?);
    let at = gpu.rows(num_ids, BLOCK, 0)?;
    let (count, row_len, vocab) = (num_ids as i64, hidden as i64, gpu.u32(local_vocab)?);
    by_dtype!(NAME, "weight", table, T => {
        let (rows, ids) = (gpu.read::<T>("weight", &table)?, gpu.read::<u32>("ids", &ids)?);
        let y = gpu.alloc::<T>(num_ids * hidden)?;
        if num_ids * hidden > 0 {
            let (rows, ids) = (rows.get::<T>(), ids.get());
            // SAFETY: there are local_vocab rows of hidden values, and y has a row for each of num_ids ids.
            unsafe { launch::embedding_forward(&at, y.out(), rows, ids, count, row_len, 0, vocab) }?;
        }
        Ok(y.into_output(dims))
    })
}

/// The gradient of a table of `v` rows of `h` values, in the dtype of `dy`.
pub(crate) fn embedding_grad((v, h): (usize, usize), ids: &Tensor, dy: &Tensor) -> Result<Tensor> {
    let gpu = Gpu::of(NAME, dy)?;
    let (ids, dy, len) = (detached(ids)?, detached(dy)?, v * h);
    let dw = gpu.alloc::<f32>(len)?;
    // SAFETY: it has len values.
    unsafe { zero(&gpu, dw.out(), len) }?;
    by_dtype!(NAME, "the gradient", dy, T => add::<T>(&gpu, (dw.out(), v, h), &ids, &dy))?;
    rounded(&gpu, dw, &dy, (v, h))
}

/// Writes, or adds if `add`, the gradient of the table to `dst`, f32; ids that are no row are skipped.
pub(crate) fn embedding_grad_into(
    dst: &Tensor,
    add: bool,
    ids: &Tensor,
    dy: &Tensor,
) -> Result<()> {
    let gpu = Gpu::of(NAME, dst)?;
    let (ids, dy) = (detached(ids)?, detached(dy)?);
    let hidden = dy.dims().last().copied().unwrap_or(1);
    let len = dst.elem_count();
    gpu.write::<f32>("dst", dst, |dst| {
        if !add {
            // SAFETY: it has len values.
            unsafe { zero(&gpu, dst, len) }?;
        }
        let table = (dst, len / hidden.max(1), hidden);
        by_dtype!(NAME, "the gradient", dy, T => self::add::<T>(&gpu, table, &ids, &dy))
    })
}

/// Adds to `grad`, a table of `v` rows of `h` values.
fn add<T: Element>(
    gpu: &Gpu,
    (grad, v, h): (Out<f32>, usize, usize),
    ids: &Tensor,
    dy: &Tensor,
) -> Result<()> {
    let num_ids = ids.elem_count();
    let (ids, dy) = (
        gpu.read::<u32>("ids", ids)?,
        gpu.read::<T>("the gradient", dy)?,
    );
    if num_ids * v * h == 0 {
        return Ok(());
    }
    let (count, local_vocab) = (gpu.u32(num_ids)?, gpu.u32(v)?);
    // SAFETY: there are num_ids ids.
    let order = unsafe { Order::new(gpu, ids.get(), num_ids, local_vocab) }?;
    // SAFETY: the order has num_ids values, grad v rows of h values, dy a row for each of num_ids ids.
    unsafe {
        launch::embedding_backward(
            &gpu.grid([num_ids, h.div_ceil(2048), 1], BLOCK, 0)?,
            grad,
            dy.get::<T>(),
            order.rows.out().read(),
            order.positions.out().read(),
            count,
            h as i64,
            local_vocab,
        )
    }
}
