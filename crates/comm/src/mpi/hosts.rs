//! Which ranks of a group share a host, and with it its network card.

use std::ops::Range;

use crate::pairwise;

/// The hosts of a group's ranks.
#[derive(Debug)]
pub(super) struct Hosts {
    /// By group rank.
    host_of: Vec<usize>,
    ranks: Vec<Vec<usize>>,
    blocks: Vec<Vec<Range<usize>>>,
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

    /// The hosts of the group of these ranks of this one.
    pub fn of_group(&self, ranks: &[usize]) -> Self {
        let said: Vec<usize> = ranks.iter().map(|rank| self.host_of(*rank)).collect();
        Self::new(&said)
    }

    /// The number of ranks of the group.
    pub fn world_size(&self) -> usize {
        self.host_of.len()
    }

    /// The number of hosts.
    pub fn len(&self) -> usize {
        self.ranks.len()
    }

    /// The host of a rank, from 0.
    pub fn host_of(&self, rank: usize) -> usize {
        self.host_of[rank]
    }

    /// The ranks on a host; they ascend.
    pub fn ranks(&self, host: usize) -> &[usize] {
        &self.ranks[host]
    }

    /// The blocks of ranks that a host can combine by itself.
    pub fn blocks(&self, host: usize) -> &[Range<usize>] {
        &self.blocks[host]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_found_by_their_hosts() {
        let hosts = Hosts::new(&[7, 7, 3, 7, 3]);
        assert_eq!((hosts.len(), hosts.world_size()), (2, 5));
        assert_eq!(hosts.ranks(0), [2, 4]);
        assert_eq!(hosts.ranks(1), [0, 1, 3]);
        assert_eq!((hosts.host_of(3), hosts.host_of(4)), (1, 0));
        assert_eq!(hosts.blocks(0), [2..3, 4..5]);
        assert_eq!(hosts.blocks(1), [0..2, 3..4]);
        let group = hosts.of_group(&[4, 1, 0]);
        assert_eq!(group.ranks(0), [0]);
        assert_eq!(group.ranks(1), [1, 2]);
    }
}
