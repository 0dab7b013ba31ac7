//! Whole tensors out of the parts that ranks hold, one at a time, on the first rank.

use candle_comm::{Mesh, P2p};
use candle_core::{Result, Shape, Tensor, bail};

use crate::params::{CatalogEntry, Holder, Parameters};

/// Joins the parts of parameter `entry` on world rank 0 and returns it there, `None` elsewhere.
///
/// `local` gives this rank's tensor for a parameter index, in the parameter's local shape: its values, its gradient. Every
/// rank must call this; only those that hold a part send it, and no rank ever has more than this one tensor whole.
pub fn gather_full(
    params: &Parameters,
    mesh: &Mesh,
    entry: &CatalogEntry,
    local: impl Fn(usize) -> Result<Tensor>,
) -> Result<Option<Tensor>> {
    let rank = mesh.world.rank();
    let own = entry.holders.iter().find(|holder| holder.rank == rank);
    let own = own
        .map(|holder| own_part(params, entry, holder, &local))
        .transpose()?;
    if rank != 0 {
        if let Some(xs) = &own {
            mesh.world.batch_send_recv(&[P2p::Send { xs, dst: 0 }])?;
        }
        return Ok(None);
    }
    let Some(dtype) = own
        .as_ref()
        .map(Tensor::dtype)
        .or_else(|| (0..params.len()).find_map(|index| Some(local(index).ok()?.dtype())))
    else {
        bail!(
            "rank 0 holds no parameter: it does not know the type of {}",
            entry.name
        );
    };
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
    params: &Parameters,
    entry: &CatalogEntry,
    holder: &Holder,
    local: impl Fn(usize) -> Result<Tensor>,
) -> Result<Tensor> {
    let Some(index) = params.iter().position(|param| param.name == entry.name) else {
        bail!(
            "rank {} does not hold parameter {}",
            holder.rank,
            entry.name
        );
    };
    let local = local(index)?;
    match params.get(index).shard() {
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
