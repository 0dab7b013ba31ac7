//! Ranks tell each other whether they succeeded, so that all go on or none.

use candle_comm::{ProcessGroup, message_of};
use candle_core::{Error, Result};
use serde::{Serialize, de::DeserializeOwned};

/// What every rank has to say, in rank order; or, if some failed, one message for all. Every rank must call it.
///
/// # Errors
/// Failures of ranks, after which nothing can be agreed upon.
pub(super) fn exchange<T: Serialize + DeserializeOwned>(
    world: &ProcessGroup,
    own: &std::result::Result<T, String>,
) -> Result<std::result::Result<Vec<T>, String>> {
    let bytes = serde_json::to_vec(own).map_err(Error::wrap)?;
    let all = world.all_gather_bytes(&bytes)?;
    let all = all
        .iter()
        .map(|bytes| serde_json::from_slice(bytes).map_err(Error::wrap));
    let all: Vec<std::result::Result<T, String>> = all.collect::<Result<_>>()?;
    let failed: Vec<(usize, String)> = all
        .iter()
        .enumerate()
        .filter_map(|(rank, said)| Some((rank, said.as_ref().err()?.clone())))
        .collect();
    let Some((rank, message)) = failed.first() else {
        return Ok(Ok(all.into_iter().flatten().collect()));
    };
    let is_same = failed.len() == all.len() && failed.iter().all(|(_, other)| other == message);
    Ok(Err(match is_same {
        true => message.clone(),
        false => format!("rank {rank}: {message}"),
    }))
}

/// An error on every rank if `own` is one on any. Every rank must call it.
pub(super) fn agree<T>(world: &ProcessGroup, own: Result<T>) -> Result<T> {
    let said = own.as_ref().map(|_| ()).map_err(message_of);
    match (exchange(world, &said)?, own) {
        (Ok(_), own) => own,
        (Err(message), _) => Err(Error::msg(message)),
    }
}
