//! The hosts of a run and their ranks, before it is known where these meet.

use super::config::LaunchConfig;
use super::hostfile;
use crate::{Error, Result};

/// A host's share of the ranks.
#[derive(Debug, Clone)]
pub(super) struct Share {
    pub(super) name: String,
    /// Of its launcher, if that has called; otherwise 0.
    pub(super) id: u64,
    pub(super) is_here: bool,
    pub(super) node_rank: usize,
    pub(super) first_rank: usize,
    pub(super) num_ranks: usize,
}

/// The hosts that this launcher starts ranks on by itself; at least one.
pub(super) fn of(config: &LaunchConfig) -> Result<Vec<Share>> {
    let Some(path) = &config.hostfile else {
        return Ok(vec![own(config)?]);
    };
    let own_name = own_name();
    let hosts = hostfile::read(path)?.into_iter().map(|line| Share {
        is_here: is_loopback(&line.host) || line.host == own_name,
        name: line.host,
        id: 0,
        node_rank: 0,
        first_rank: 0,
        num_ranks: line.slots,
    });
    Ok(numbered(hosts))
}

/// This host.
pub(super) fn own(config: &LaunchConfig) -> Result<Share> {
    match config.nproc_per_node.unwrap_or(1) {
        0 => Err(Error::Launch(
            "--nproc-per-node: expected at least 1, got 0".to_string(),
        )),
        num_ranks => Ok(Share {
            name: own_name(),
            id: 0,
            is_here: true,
            node_rank: 0,
            first_rank: 0,
            num_ranks,
        }),
    }
}

/// The hosts with consecutive numbers, for themselves and for their ranks.
pub(super) fn numbered(hosts: impl IntoIterator<Item = Share>) -> Vec<Share> {
    let mut num_ranks_before = 0;
    let number = |(node_rank, host): (usize, Share)| {
        let first_rank = num_ranks_before;
        num_ranks_before += host.num_ranks;
        Share {
            node_rank,
            first_rank,
            ..host
        }
    };
    hosts.into_iter().enumerate().map(number).collect()
}

/// The name of this host: CANDLE_TRAIN_HOST, or else the system's.
fn own_name() -> String {
    let given = std::env::var("CANDLE_TRAIN_HOST").ok();
    let name = given.or_else(|| nix::unistd::gethostname().ok()?.into_string().ok());
    name.unwrap_or_else(|| "localhost".to_string())
}

pub(super) fn is_loopback(host: &str) -> bool {
    host == "localhost" || host == "::1" || host.starts_with("127.")
}
