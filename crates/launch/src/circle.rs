//! Ranks that wait for each other.

/// The first circle of ranks that is found from one of `firsts`: each of them waits for another one of it. They ascend,
/// and are below `num_ranks`. `awaited` says for whom a rank waits.
pub fn circle(
    firsts: impl IntoIterator<Item = usize>,
    num_ranks: usize,
    awaited: impl Fn(usize) -> Vec<usize>,
) -> Option<Vec<usize>> {
    let mut is_seen = vec![false; num_ranks];
    for first in firsts {
        let mut path = vec![(first, awaited(first))];
        is_seen[first] = true;
        while let Some((_, others)) = path.last_mut() {
            let Some(next) = others.pop() else {
                path.pop();
                continue;
            };
            if let Some(begin) = path.iter().position(|(rank, _)| *rank == next) {
                let mut circle: Vec<_> = path[begin..].iter().map(|(rank, _)| *rank).collect();
                circle.sort_unstable();
                return Some(circle);
            }
            if !std::mem::replace(&mut is_seen[next], true) {
                path.push((next, awaited(next)));
            }
        }
    }
    None
}
