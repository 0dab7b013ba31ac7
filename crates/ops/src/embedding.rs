//! Table look-up: `y[i] = weight[ids[i]]`; backward: `dweight[v] = sum of dy[i] over ids[i] = v`, in the order of `i`.

use crate::chunks::{for_each_chunk, rows_per_chunk};
use crate::host::{HostF32, HostU32};
use crate::with_backward1;
use candle_core::{Result, Tensor, bail};

const NAME: &str = "embedding";

/// The rows of `weight` named by `ids`.
///
/// An id that is not a row (`>= v`) gives zeros and no gradient: a vocabulary shard maps the ids of the other shards
/// to `u32::MAX`.
///
/// # Shapes
/// `weight (v, h)` f32, `ids (b, t)` u32 (any rank) -> `(b, t, h)`.
///
/// # Errors
/// When `weight` has not two dimensions, or a tensor has another dtype or device.
pub fn embedding(weight: &Tensor, ids: &Tensor) -> Result<Tensor> {
    let &[v, h] = weight.dims() else {
        bail!("{NAME}: expected weight (v, h), got {:?}", weight.dims())
    };
    let table = HostF32::new(NAME, "weight", weight)?;
    let ids_host = HostU32::new(NAME, "ids", ids)?;
    let mut dims = ids.dims().to_vec();
    dims.push(h);
    let y = gather(&table.read(), &ids_host.read(), h);
    with_backward1(weight, (y, dims), NAME, move |dy| {
        let dy = HostF32::new(NAME, "the gradient", dy)?;
        let dw = scatter_add(&dy.read(), &ids_host.read(), v, h);
        Ok(Some(Tensor::from_vec(dw, (v, h), dy.tensor().device())?))
    })
}

fn gather(table: &[f32], ids: &[u32], h: usize) -> Vec<f32> {
    let mut y = vec![0f32; ids.len() * h];
    if h == 0 {
        return y;
    }
    let (rows, v) = (rows_per_chunk(h), table.len() / h);
    let work = y.len();
    for_each_chunk(&mut y, rows * h, work, |chunk, y| {
        for (y, &id) in y.chunks_exact_mut(h).zip(&ids[chunk * rows..]) {
            let id = id as usize;
            if id < v {
                y.copy_from_slice(&table[id * h..][..h]);
            }
        }
    });
    y
}

/// Each chunk of table rows adds its own positions, found in the list of positions sorted by id.
fn scatter_add(dy: &[f32], ids: &[u32], v: usize, h: usize) -> Vec<f32> {
    let mut dw = vec![0f32; v * h];
    if h == 0 {
        return dw;
    }
    let mut by_id: Vec<(u32, usize)> = ids.iter().copied().zip(0..).collect();
    by_id.sort_unstable();
    let rows = rows_per_chunk(h);
    for_each_chunk(&mut dw, rows * h, dy.len(), |chunk, dw| {
        let first_row = chunk * rows;
        let start = by_id.partition_point(|&(id, _)| (id as usize) < first_row);
        let last_row = first_row + dw.len() / h;
        for &(id, i) in by_id[start..]
            .iter()
            .take_while(|(id, _)| (*id as usize) < last_row)
        {
            let row = &mut dw[(id as usize - first_row) * h..][..h];
            for (dw, dy) in row.iter_mut().zip(&dy[i * h..][..h]) {
                *dw += dy;
            }
        }
    });
    dw
}
