//! Whole tensors out of the parts that ranks hold, one at a time, on the first rank.

use candle_comm::{Mesh, P2p};
use candle_core::{DType, Error, Result, Shape, Tensor, bail};

use crate::params::{Holder, Param, ParamSpec, Parameters};

/// Joins the parts of parameter `entry` on world rank 0 and returns it there, in the type `dtype`; `None` elsewhere.
///
/// `local` gives this rank's tensor for a parameter index, in the parameter's local shape: its values, its gradient. Every
/// rank must call this. `local` is called on every rank that has the parameter, on all replicas and stages, and so may be
/// collective among them; only holders send their part, and no rank ever has more than this one tensor whole.
///
/// # Errors
/// An error of `local`, parts that are missing or of another type, and what ends collectives.
pub fn gather_full(
    params: &Parameters,
    mesh: &Mesh,
    entry: &ParamSpec,
    dtype: DType,
    local: impl Fn(usize) -> Result<Tensor>,
) -> Result<Option<Tensor>> {
    let rank = mesh.world.rank();
    let index = params.iter().position(|param| param.name == entry.name);
    let local = index.map(|index| Ok::<_, Error>((params.get(index), local(index)?)));
    let local = local.transpose()?;
    let holders = params.model().holders(entry);
    let own = holders.iter().filter(|holder| holder.rank == rank);
    let own = own.map(|holder| {
        let part = match &local {
            Some((param, local)) => own_part(param, local, holder)?,
            None => None,
        };
        match part {
            Some(part) => part.to_dtype(dtype)?.contiguous(),
            None => bail!("rank {rank} does not hold parameter {}", entry.name),
        }
    });
    let own: Vec<Tensor> = own.collect::<Result<_>>()?;
    if rank != 0 {
        if !own.is_empty() {
            let sends = own.iter().map(|xs| P2p::Send { xs, dst: 0 });
            mesh.world.batch_send_recv(&sends.collect::<Vec<_>>())?;
        }
        return Ok(None);
    }
    let receives = holders
        .iter()
        .filter(|holder| holder.rank != 0)
        .map(|holder| {
            let mut dims = entry.shape.clone();
            if let Some(len) = dims.get_mut(entry.dim()) {
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
    // What a rank sends comes in the order of the parts.
    let (mut own, mut received) = (own.into_iter(), received.into_iter());
    let parts = holders.iter().filter_map(|holder| match holder.rank {
        0 => own.next(),
        _ => received.next(),
    });
    let parts: Vec<Tensor> = parts.collect();
    match parts.as_slice() {
        [] => bail!("no rank holds parameter {}", entry.name),
        [whole] => Ok(Some(whole.clone())),
        parts => Ok(Some(Tensor::cat(parts, entry.dim())?)),
    }
}

/// What `holder`, this rank, owns of its local values, if it holds it.
fn own_part(param: &Param, local: &Tensor, holder: &Holder) -> Result<Option<Tensor>> {
    match param.shard() {
        // The range is empty of a parameter without values.
        Some(_) if !holder.range.is_empty() => param.narrow(local, &holder.range),
        _ => Ok(Some(local.clone())),
    }
}
