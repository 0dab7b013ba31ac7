//! Whole tensors out of the parts that ranks hold, one at a time, on the first rank.

use candle_comm::{Mesh, P2p};
use candle_core::{DType, Error, Result, Shape, Tensor, bail};

use crate::params::{CatalogEntry, Holder, Param, Parameters};

/// Joins the parts of parameter `entry` on world rank 0 and returns it there, in the type `dtype`; `None` elsewhere.
///
/// `local` gives this rank's tensor for a parameter index, in the parameter's local shape: its values, its gradient. Every
/// rank must call this. `local` is called on every rank that has the parameter, on all replicas and stages, and so may be
/// collective among them; only holders send their part, and no rank ever has more than this one tensor whole.
pub fn gather_full(
    params: &Parameters,
    mesh: &Mesh,
    entry: &CatalogEntry,
    dtype: DType,
    local: impl Fn(usize) -> Result<Tensor>,
) -> Result<Option<Tensor>> {
    let rank = mesh.world.rank();
    let index = params.iter().position(|param| param.name == entry.name);
    let local = index.map(|index| Ok::<_, Error>((params.get(index), local(index)?)));
    let local = local.transpose()?;
    let own = entry.holders.iter().find(|holder| holder.rank == rank);
    let own = match (own, local) {
        (None, _) => None,
        (Some(holder), Some((param, local))) => {
            let part = own_part(param, &local, entry.dim, holder)?;
            Some(part.to_dtype(dtype)?.contiguous()?)
        }
        (Some(_), None) => bail!("rank {rank} does not hold parameter {}", entry.name),
    };
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

/// What `holder`, this rank, owns of its local values.
fn own_part(param: &Param, local: &Tensor, dim: usize, holder: &Holder) -> Result<Tensor> {
    match param.shard() {
        None => Ok(local.clone()),
        Some(shard) => local.narrow(
            dim,
            holder.range.start - shard.range.start,
            holder.range.len(),
        ),
    }
}
