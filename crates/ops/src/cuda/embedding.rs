//! Rows of a table, and the gradient of the table, on the GPU. The gradient is summed in the order of the positions: rows
//! are sorted first, then each is added up by one block.

use super::elements::fill;
use super::launch;
use super::values::{BLOCK, Element, Gpu, by_dtype, dims_must_be};
use candle_core::{Result, Tensor, bail};

const NAME: &str = "embedding";

/// The table's row for each id; zeros for ids that this slice of the vocabulary does not have.
///
/// # Shapes
/// `table (v, h)` f32 or bf16, `ids` u32 of any shape -> `(ids.., h)`; id `vocab_start` is row 0.
///
/// # Errors
/// When the shapes or dtypes do not fit, or a tensor is not on the same GPU.
pub fn embedding_forward(table: &Tensor, ids: &Tensor, vocab_start: usize) -> Result<Tensor> {
    let (table, ids) = (table.contiguous()?, ids.contiguous()?);
    by_dtype!(NAME, table.dtype(), T => forward::<T>(&table, &ids, vocab_start))
}

fn forward<T: Element>(table: &Tensor, ids: &Tensor, vocab_start: usize) -> Result<Tensor> {
    let gpu = Gpu::of(NAME, table)?;
    let (local_vocab, hidden) = table.dims2()?;
    let num_ids = ids.elem_count();
    let dims = [ids.dims(), &[hidden]].concat();
    let (table, ids) = (gpu.read::<T>("table", table)?, gpu.read::<u32>("ids", ids)?);
    let y = gpu.alloc::<T>(num_ids * hidden)?;
    if num_ids * hidden > 0 {
        // SAFETY: table has local_vocab rows of hidden values, y a row for each of num_ids ids.
        unsafe {
            launch::embedding_forward(
                &gpu.rows(num_ids, BLOCK, 0)?,
                y.out(),
                table.get::<T>(),
                ids.get(),
                num_ids as i64,
                hidden as i64,
                gpu.u32(vocab_start)?,
                gpu.u32(local_vocab)?,
            )
        }?;
    }
    Ok(y.into_tensor(dims))
}

/// Writes, or adds if `add`, the gradient of the table to `dst`, f32; ids that are no row are skipped.
pub(crate) fn embedding_grad_into(
    dst: &Tensor,
    add: bool,
    ids: &Tensor,
    dy: &Tensor,
) -> Result<()> {
    let gpu = Gpu::of(NAME, dst)?;
    if !add {
        fill(&gpu, dst, 0.0)?;
    }
    let (ids, dy) = (ids.detach().contiguous()?, dy.detach().contiguous()?);
    by_dtype!(NAME, dy.dtype(), T => grad_add::<T>(&gpu, dst, &ids, &dy))
}

fn grad_add<T: Element>(gpu: &Gpu, dst: &Tensor, ids: &Tensor, dy: &Tensor) -> Result<()> {
    let hidden = dy.dims().last().copied().unwrap_or(1);
    dims_must_be(NAME, "the gradient", dy, &[ids.dims(), &[hidden]].concat())?;
    let len = dst.elem_count();
    if !len.is_multiple_of(hidden.max(1)) {
        bail!("{NAME}: expected a gradient buffer of rows of {hidden}, got {len} values")
    }
    let num_ids = ids.elem_count();
    if num_ids == 0 || len == 0 {
        return Ok(());
    }
    let count = gpu.u32(num_ids)?;
    let local_vocab = gpu.u32(len / hidden)?;
    let (ids, dy) = (
        gpu.read::<u32>("ids", ids)?,
        gpu.read::<T>("the gradient", dy)?,
    );
    let (rows, order) = (gpu.alloc_u32(num_ids)?, gpu.alloc_u32(num_ids)?);
    let sort = gpu.blocks(num_ids.div_ceil(BLOCK as usize), BLOCK, 4 * BLOCK as usize)?;
    let (sorted, from) = (rows.out(), order.out());
    // SAFETY: ids and both results have num_ids values; a thread for each, and shared memory for a block's ids.
    unsafe { launch::embedding_order(&sort, sorted, from, ids.get(), count, 0, local_vocab) }?;
    gpu.write::<f32>("the buffer", dst, |grad| {
        // SAFETY: grad has local_vocab rows of hidden values, dy a row for each of num_ids ids.
        unsafe {
            launch::embedding_backward(
                &gpu.grid([num_ids, hidden.div_ceil(2048), 1], BLOCK, 0)?,
                grad,
                dy.get::<T>(),
                sorted.read(),
                from.read(),
                count,
                hidden as i64,
                local_vocab,
            )
        }
    })
}
