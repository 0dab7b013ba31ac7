//! Who a rank is and what it did last, in words.

use std::time::Duration;

use super::hub::Peer;

/// "rank 2 on host b (process 4711)".
pub(super) fn name(rank: usize, host: &str, pid: u32) -> String {
    format!("rank {rank} on host {host} (process {pid})")
}

/// The same of a rank that is in.
pub(super) fn peer_name(rank: usize, peer: &Peer) -> String {
    name(rank, &peer.host, peer.pid)
}

/// What a rank did last.
pub(super) fn last(peer: &Peer, now: Duration) -> String {
    let age = now.saturating_sub(peer.heard);
    let left = if peer.left { ", then left the run" } else { "" };
    format!("{}{left}", peer.snapshot.describe(age))
}

/// One line per rank: what it did last.
pub(super) fn all(peers: &[Option<Peer>], now: Duration) -> String {
    let line = |(rank, peer): (usize, &Option<Peer>)| match peer {
        Some(peer) => format!("  {}: {}", peer_name(rank, peer), last(peer, now)),
        None => format!("  rank {rank}: not there"),
    };
    peers
        .iter()
        .enumerate()
        .map(line)
        .collect::<Vec<_>>()
        .join("\n")
}

/// "rank 2" or "ranks 1, 3".
pub(super) fn rank_list(ranks: &[usize]) -> String {
    let names: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", names.join(", "))
}
