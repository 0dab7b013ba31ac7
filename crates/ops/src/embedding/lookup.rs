//! Table look-up: `y[i] = weight[ids[i]]`; backward: `dweight[v] = sum of dy[i] over ids[i] = v`, in the order of `i`.

use crate::cpu::chunks::{for_each_chunk, rows_per_chunk};
use crate::cpu::element::{Element, by_float};
use crate::cpu::filled::{filled, zeros};
use crate::cpu::half_precision::add_values;
use crate::host::floats::HostFloats;
use crate::host::in_place::write;
use crate::host::on_cuda::on_cuda;
use crate::host::op_output::OpOutput;
use crate::host::values::Host;
use crate::host::with_backward::with_backward;
use candle_core::{Result, Tensor, bail};

pub(crate) const NAME: &str = "embedding";

/// The rows of `weight` named by `ids`.
///
/// An id that is not a row (`>= v`) gives zeros and no gradient: a vocabulary shard maps the ids of the other shards
/// to `u32::MAX`. Exact; the gradient sums an id's positions in order, with a relative error against f64 of about 4e-8
/// where ids seldom repeat and 2e-7 where they often do: see `docs/accuracy.md`.
///
/// # Shapes
/// `weight (v, h)`, `ids (b, t)` u32 (any rank) -> `(b, t, h)`.
///
/// # Errors
/// When `weight` has not two dimensions, or a tensor has another dtype or device.
pub fn embedding(weight: &Tensor, ids: &Tensor) -> Result<Tensor> {
    let y = forward(weight, ids)?;
    let (table, ids) = (weight.dims2()?, ids.detach());
    with_backward([weight], y, NAME, move |dy| {
        Ok([Some(table_grad(table, &ids, dy)?)])
    })
}

/// [`embedding`] outside any graph.
///
/// # Shapes
/// `weight (v, h)`, `ids (b, t)` u32 (any rank) -> `(b, t, h)`.
///
/// # Errors
/// When `weight` has not two dimensions, or a tensor has another dtype or device.
pub fn embedding_forward(weight: &Tensor, ids: &Tensor) -> Result<Tensor> {
    Ok(forward(weight, ids)?.into_tensor())
}

/// Writes, or adds if `add`, the gradient of the table to `dst`; outside any graph.
///
/// Ids that are no row of the table are skipped; without `add`, rows that no id names become zeros.
///
/// # Shapes
/// `dst` the `v * h` values of the table, row by row, f32; `ids (b, t)` u32 (any rank), `dy (b, t, h)` f32, bf16 or f16.
///
/// # Errors
/// When the shapes do not fit, or a tensor has another dtype or device.
pub fn embedding_grad_into(dst: &Tensor, add: bool, ids: &Tensor, dy: &Tensor) -> Result<()> {
    let h = width(ids, dy)?;
    let len = dst.elem_count();
    if len > 0 && len.checked_rem(h) != Some(0) {
        bail!("{NAME}: expected a gradient buffer of rows of {h}, got {len} values")
    }
    on_cuda!(dst => super::lookup_gpu::embedding_grad_into(dst, add, ids, dy));
    let _timer = crate::timing::op_timer::op("embedding_grad_into");
    let (dy, ids) = gradient_and_ids(ids, dy)?;
    by_float!(dy.dtype(), T => write(NAME, "dst", dst, len, |dst: &mut [f32]| {
        scatter_add::<T>(dst, add, &dy.read_as(), &ids.read(), h);
    }))
}

/// The gradient of a table `(v, h)`, in the dtype of `dy`.
fn table_grad(table: (usize, usize), ids: &Tensor, dy: &Tensor) -> Result<Tensor> {
    let h = width(ids, dy)?;
    if h != table.1 {
        bail!(
            "{NAME}: expected a gradient of rows of {}, got {:?}",
            table.1,
            dy.dims()
        )
    }
    on_cuda!(dy => super::lookup_gpu::embedding_grad(table, ids, dy));
    let _timer = crate::timing::op_timer::op("embedding_grad");
    let dtype = dy.dtype();
    let (dy, ids) = gradient_and_ids(ids, dy)?;
    let mut dw = zeros(table.0 * table.1);
    by_float!(dtype, T => scatter_add::<T>(&mut dw, true, &dy.read_as(), &ids.read(), h));
    Ok(OpOutput::rounded(dw, dtype, table).into_tensor())
}

/// `h` of a gradient `(.., h)` that fits `ids`.
fn width(ids: &Tensor, dy: &Tensor) -> Result<usize> {
    match dy.dims() {
        [leading @ .., h] if leading == ids.dims() => Ok(*h),
        dims => bail!(
            "{NAME}: expected a gradient (.., h) for ids {:?}, got {dims:?}",
            ids.dims()
        ),
    }
}

fn gradient_and_ids(ids: &Tensor, dy: &Tensor) -> Result<(HostFloats, Host<u32>)> {
    let dy = HostFloats::new(NAME, "the gradient", dy)?;
    Ok((dy, Host::<u32>::new(NAME, "ids", ids)?))
}

fn forward(weight: &Tensor, ids: &Tensor) -> Result<OpOutput> {
    let &[_v, h] = weight.dims() else {
        bail!("{NAME}: expected weight (v, h), got {:?}", weight.dims())
    };
    on_cuda!(weight => super::lookup_gpu::embedding_forward(weight, ids));
    let _timer = crate::timing::op_timer::op("embedding_forward");
    let table = HostFloats::new(NAME, "weight", weight)?;
    let dims = [ids.dims(), &[h]].concat();
    let ids = Host::<u32>::new(NAME, "ids", ids)?;
    Ok(by_float!(table.dtype(), T => {
        OpOutput::of(gather::<T>(&table.read_as(), &ids.read(), h), dims)
    }))
}

fn gather<T: Element>(table: &[T], ids: &[u32], h: usize) -> Vec<T> {
    let (v, rows, len) = (table.len() / h.max(1), rows_per_chunk(h), ids.len() * h);
    filled(len, rows * h, len, |chunk, y: &mut [T]| {
        for (y, &id) in y.chunks_exact_mut(h).zip(&ids[chunk * rows..]) {
            let id = id as usize;
            if id < v {
                y.copy_from_slice(&table[id * h..][..h]);
            }
        }
    })
}

/// Each chunk of table rows adds its own positions, found in the list of positions sorted by id.
fn scatter_add<T: Element>(dst: &mut [f32], add: bool, dy: &[T], ids: &[u32], h: usize) {
    if h == 0 {
        return;
    }
    let mut by_id: Vec<(u32, usize)> = ids.iter().copied().zip(0..).collect();
    by_id.sort_unstable();
    let rows = rows_per_chunk(h);
    let work = dy.len() + if add { 0 } else { dst.len() };
    for_each_chunk(dst, rows * h, work, |chunk, dst| {
        if !add {
            dst.fill(0.0);
        }
        let first_row = chunk * rows;
        let last_row = first_row + dst.len() / h;
        let start = by_id.partition_point(|&(id, _)| (id as usize) < first_row);
        for &(id, i) in by_id[start..]
            .iter()
            .take_while(|(id, _)| (*id as usize) < last_row)
        {
            let row = &mut dst[(id as usize - first_row) * h..][..h];
            add_values(row, &dy[i * h..][..h]);
        }
    });
}
