//! The hosts of a run and their ranks, before it is known where these meet.

use super::config::LaunchConfig;
use super::hostfile;
use crate::{Error, Result};

/// A host's share of the ranks.
#[derive(Debug, Clone)]
pub(super) struct Share {
    pub(super) name: String,
    pub(super) is_here: bool,
    pub(super) node_rank: usize,
    pub(super) first_rank: usize,
    pub(super) num_ranks: usize,
}

/// The hosts that this launcher starts ranks on; at least one.
pub(super) fn of(config: &LaunchConfig) -> Result<Vec<Share>> {
    let own_name = own_name();
    if let Some(path) = &config.hostfile {
        let hosts = hostfile::read(path)?.into_iter().map(|line| Share {
            is_here: is_loopback(&line.host) || line.host == own_name,
            name: line.host,
            node_rank: 0,
            first_rank: 0,
            num_ranks: line.slots,
        });
        return Ok(numbered(hosts));
    }
    let num_ranks = config.nproc_per_node.unwrap_or(1);
    let node_rank = check_nodes(config)?;
    if num_ranks == 0 {
        return Err(Error::Launch(
            "--nproc-per-node: expected at least 1, got 0".to_string(),
        ));
    }
    let share = Share {
        name: own_name,
        is_here: true,
        node_rank,
        first_rank: node_rank * num_ranks,
        num_ranks,
    };
    Ok(vec![share])
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

/// The number of this host, if `--nnodes` and its companions agree.
fn check_nodes(config: &LaunchConfig) -> Result<usize> {
    let nnodes = config.nnodes;
    let problem = match (nnodes, config.node_rank, &config.rdzv) {
        (0, _, _) => "--nnodes: expected at least 1, got 0".to_string(),
        (2.., None, _) => format!(
            "--nnodes {nnodes} needs --node-rank, the number of this host from 0\n\
             hint: run the same command on each host, with another --node-rank; or use --hostfile"
        ),
        (2.., _, None) => format!(
            "--nnodes {nnodes} needs --rdzv HOST:PORT, the same on all hosts: a name of the first host and a port free there"
        ),
        (_, Some(node_rank), _) if node_rank >= nnodes => {
            format!("--node-rank: expected a number below --nnodes {nnodes}, got {node_rank}")
        }
        (_, node_rank, _) => return Ok(node_rank.unwrap_or(0)),
    };
    Err(Error::Launch(problem))
}

fn own_name() -> String {
    let name = nix::unistd::gethostname().ok();
    name.and_then(|name| name.into_string().ok())
        .unwrap_or_else(|| "localhost".to_string())
}

pub(super) fn is_loopback(host: &str) -> bool {
    host == "localhost" || host == "::1" || host.starts_with("127.")
}
