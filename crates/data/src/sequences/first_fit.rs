//! First-fit bin packing in O(n log n): each item goes into the first bin that has room for it.

/// Bins of one capacity, as a tree: the room in each, and over each pair the larger one.
pub(crate) struct FirstFit {
    /// Leaves from `num_leaves` on; node i has the children 2i and 2i + 1. Bins that are not open yet have all their room.
    room: Vec<usize>,
    num_leaves: usize,
}

impl FirstFit {
    /// For at most `num_items` items.
    pub fn new(capacity: usize, num_items: usize) -> Self {
        let num_leaves = num_items.next_power_of_two();
        Self {
            room: vec![capacity; 2 * num_leaves],
            num_leaves,
        }
    }

    /// The bin of an item of `size`, which is at most the capacity.
    pub fn put(&mut self, size: usize) -> usize {
        debug_assert!(size <= self.room[1]);
        let mut node = 1;
        while node < self.num_leaves {
            node *= 2;
            if self.room[node] < size {
                node += 1;
            }
        }
        let bin = node - self.num_leaves;
        self.room[node] -= size;
        while node > 1 {
            node /= 2;
            self.room[node] = self.room[2 * node].max(self.room[2 * node + 1]);
        }
        bin
    }
}
