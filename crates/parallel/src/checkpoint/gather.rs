//! Whole tensors out of the parts that ranks hold, one at a time, on the first rank.

use candle_comm::{Mesh, P2p};
use candle_core::{DType, Result, Shape, Tensor, bail};

use crate::params::{CatalogEntry, Holder, Param, Parameters};

/// Joins the parts of parameter `entry` on world rank 0 and returns it there, `None` elsewhere.
///
/// `local` gives this rank's tensor for a parameter index, in the parameter's local shape and of type `dtype`: its values, its
/// gradient. Every rank must call this; on each that has the parameter `local` is called, so it may gather over data-parallel
/// ranks; only those that own a part send it, and no rank ever has more than this one tensor whole.
pub fn gather_full(
    params: &Parameters,
    mesh: &Mesh,
    entry: &CatalogEntry,
    dtype: DType,
    local: impl Fn(usize) -> Result<Tensor>,
) -> Result<Option<Tensor>> {
    let rank = mesh.world.rank();
    let index = params.iter().position(|param| param.name == entry.name);
    let local = index.map(local).transpose()?;
    let own = entry.holders.iter().find(|holder| holder.rank == rank);
    let own = own.zip(index.zip(local));
    let own =
        own.map(|(holder, (index, local))| own_part(params.get(index), entry, holder, &local));
    let own = own.transpose()?;
    if rank != 0 {
        if let Some(xs) = &own {
            mesh.world.batch_send_recv(&[P2p::Send { xs, dst: 0 }])?;
        }
        return Ok(None);
    }
    let receives = entry
        .holders
        .iter()
        .filter(|holder| holder.rank != 0)
        .map(|holder| {
            let mut dims = entry.shape.clone();
            if let Some(len) = dims.get_mut(entry.dim) {
                *len = holder.range.len();
            }
            P2p::Recv {
                shape: Shape::from(dims),
                dtype,
                src: holder.rank,
            }
        });
    let receives: Vec<_> = receives.collect();
    let received = match receives.is_empty() {
        true => Vec::new(),
        false => mesh.world.batch_send_recv(&receives)?,
    };
    // Holders are in rank order, so rank 0's part, if it has one, is the first.
    let parts: Vec<Tensor> = own.into_iter().chain(received).collect();
    match parts.as_slice() {
        [] => bail!("no rank holds parameter {}", entry.name),
        [whole] => Ok(Some(whole.clone())),
        parts => Ok(Some(Tensor::cat(parts, entry.dim)?)),
    }
}

fn own_part(
    param: &Param,
    entry: &CatalogEntry,
    holder: &Holder,
    local: &Tensor,
) -> Result<Tensor> {
    match param.shard() {
        None => local.contiguous(),
        Some(shard) => local
            .narrow(
                entry.dim,
                holder.range.start - shard.range.start,
                holder.range.len(),
            )?
            .contiguous(),
    }
}
