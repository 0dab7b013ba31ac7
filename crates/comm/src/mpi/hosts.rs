//! Which ranks of a group share a host, and with it its network card.

use std::ops::Range;

use crate::pairwise;

/// The hosts of a group's ranks.
#[derive(Debug)]
pub(super) struct Hosts {
    /// By group rank, from 0.
    pub host_of: Vec<usize>,
    /// By host; they ascend.
    pub ranks: Vec<Vec<usize>>,
    /// By host: the blocks of ranks that it can combine by itself.
    pub blocks: Vec<Vec<Range<usize>>>,
}

impl Hosts {
    /// The hosts of ranks of which each says the same number as the others on its host.
    pub fn new(said: &[usize]) -> Self {
        let mut numbers = said.to_vec();
        numbers.sort_unstable();
        numbers.dedup();
        let mut ranks = vec![Vec::new(); numbers.len()];
        let mut host_of = Vec::with_capacity(said.len());
        for (rank, number) in said.iter().enumerate() {
            let host = numbers.partition_point(|known| known < number);
            ranks[host].push(rank);
            host_of.push(host);
        }
        let blocks = ranks.iter();
        let blocks = blocks.map(|ranks: &Vec<usize>| pairwise::blocks(ranks, said.len()));
        Self {
            blocks: blocks.collect(),
            host_of,
            ranks,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_found_by_their_hosts() {
        let hosts = Hosts::new(&[7, 7, 3, 7, 3]);
        assert_eq!(hosts.host_of, [1, 1, 0, 1, 0]);
        assert_eq!(hosts.ranks, [vec![2, 4], vec![0, 1, 3]]);
        assert_eq!(hosts.blocks, [vec![2..3, 4..5], vec![0..2, 3..4]]);
    }
}
