//! Where ranks that are processes meet.

use std::sync::Arc;

#[cfg(feature = "mpi")]
use candle_core::Result;
use candle_launch::Control;
#[cfg(feature = "mpi")]
use candle_launch::{ControlConfig, RankEnv, Secret};

#[cfg(feature = "nccl")]
use crate::RunConfig;
#[cfg(feature = "mpi")]
use crate::{ProcessGroup, error::argument};

/// Where ranks of one host meet that no launcher has told.
const LOOPBACK: &str = "127.0.0.1";

/// Joins the control plane where the environment says; a rank that is alone meets nobody and needs no such place.
#[cfg(feature = "nccl")]
pub(super) fn meet(config: &RunConfig) -> candle_launch::Result<Arc<Control>> {
    let master = match config.env.master() {
        Err(_) if config.env.world_size() == 1 => (LOOPBACK.to_string(), 0),
        master => master?,
    };
    Control::join(&config.control(master))
}

/// Joins the control plane where rank 0 says, over `world`: at the meeting point of its environment, or else at a port
/// of its own; by a secret that it has made and that has come over MPI. What the environments of the others say does not count, as launchers do not give all ranks the same. The inner error is one that
/// all ranks have.
#[cfg(feature = "mpi")]
pub(super) fn meet_over(
    world: &ProcessGroup,
    env: &RankEnv,
    config: impl FnOnce((String, u16)) -> ControlConfig,
) -> Result<candle_launch::Result<Arc<Control>>> {
    let (mut own, mut listener) = (String::new(), None);
    if world.rank() == 0 {
        let (host, port) = match env.master() {
            Ok(master) => master,
            Err(_) => {
                let is_one_host = env.local_world_size() == env.world_size();
                let host = if is_one_host { LOOPBACK } else { env.host() };
                let free = Control::listen(host, is_one_host).map_err(candle_core::Error::wrap)?;
                let port = free.local_addr()?.port();
                listener = Some(free);
                (host.to_string(), port)
            }
        };
        let secret = Secret::random().map_err(candle_core::Error::wrap)?;
        own = format!("{host} {port} {}", secret.as_str());
    }
    let said = world.all_gather_bytes(own.as_bytes())?;
    let first = said.into_iter().next().map(String::from_utf8);
    let meeting = first.and_then(|said| {
        let said = said.ok()?;
        let mut words = said.split(' ').map(String::from);
        let (host, port, secret) = (words.next()?, words.next()?, words.next()?);
        Some(((host, port.parse().ok()?), secret))
    });
    let Some((master, secret)) = meeting else {
        return Err(argument("rank 0 did not say where the ranks meet"));
    };
    let config = ControlConfig {
        secret: secret.into(),
        is_guessable: false,
        ..config(master)
    };
    match Control::join_at(&config, listener) {
        Err(error) if !matches!(error, candle_launch::Error::CannotStart(_)) => {
            Err(candle_core::Error::wrap(error))
        }
        joined => Ok(joined),
    }
}
