//! Ranks that wait for each other.

/// The first circle that is found from one of `firsts`, which need not be in it: ranks each of which waits for another one of
/// them, in rising order. `awaited` gives the ranks that a rank waits for; all ranks are below `num_ranks`.
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
