//! What the ranks were doing, for error messages.

use super::world::State;

/// A group's name: the world, or its ranks.
pub(crate) fn group_name(members: &[usize]) -> String {
    format!("group {members:?}")
}

/// Ranks as words: "rank 2", "ranks 1, 3".
pub(crate) fn rank_list(ranks: &[usize]) -> String {
    let names: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    match ranks {
        [] => "nobody (all ranks are there, the result is being computed)".to_string(),
        [rank] => format!("rank {rank}"),
        _ => format!("ranks {}", names.join(", ")),
    }
}

/// One line per rank: its last operation.
pub(super) fn last_operations(state: &State) -> String {
    let lines: Vec<String> = (0..state.ranks.len())
        .map(|rank| format!("  rank {rank}: {}", last_operation(state, rank)))
        .collect();
    lines.join("\n")
}

fn last_operation(state: &State, rank: usize) -> String {
    let rank = &state.ranks[rank];
    let left = if rank.left { ", then left" } else { "" };
    let Some(last) = &rank.last else {
        return format!("has started no operation{left}");
    };
    let group = group_name(&state.groups[last.group].members);
    match last.seq {
        Some(seq) => format!("{} ({group}, operation number {seq}){left}", last.call),
        None => format!("{} ({group}){left}", last.call),
    }
}
