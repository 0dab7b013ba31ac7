//! Where each trainable parameter lies in the flat buffers that gradients, their reduction and the optimizer's state share.

use super::{Param, Tie};

/// Values to whose multiples each data-parallel rank's slice of a bucket is padded: 256 bytes of f32, on which kernels and
/// copies of a GPU start best.
const SLICE_ALIGNMENT: usize = 64;

/// Buckets of parameters that are reduced and updated together, in the order in which a backward pass is done with them: those of
/// one block each, the last block first, then those of parameters tied across pipeline stages.
#[derive(Debug)]
pub(crate) struct ParamLayout {
    pub buckets: Vec<Bucket>,
    /// Of each parameter, the bucket and the place of its first value there; `None` for frozen ones.
    places: Vec<Option<(usize, usize)>>,
}

/// Parameters that lie one after the other in a flat buffer.
#[derive(Debug)]
pub(crate) struct Bucket {
    /// The first block that uses one of its parameters. Its backward pass is the last to add to their gradients.
    pub block: usize,
    /// The tie between stages that all of its parameters have, by its index. Tied parameters have buckets of their own, of one
    /// length on all their stages: so whatever order a reduction sums in, it is the same for every copy.
    pub tie: Option<usize>,
    /// Number of values, padded so that data-parallel ranks divide it evenly.
    pub len: usize,
    /// Its parameters in name order.
    pub slots: Vec<Slot>,
}

/// The place of a parameter in its bucket.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    /// Index of the parameter.
    pub param: usize,
    /// Its values in the bucket.
    pub range: std::ops::Range<usize>,
}

impl ParamLayout {
    pub fn new(params: &[Param], ties: &[Tie], dp_world_size: usize) -> Self {
        let tie_of = |index: usize| ties.iter().position(|tie| tie.params.contains(&index));
        let block_of = |index: usize| params[index].blocks.iter().min().copied().unwrap_or(0);
        let trainable: Vec<usize> = (0..params.len())
            .filter(|&index| params[index].trainable)
            .collect();
        let mut keys: Vec<(Option<usize>, std::cmp::Reverse<usize>)> = trainable
            .iter()
            .map(|&index| match tie_of(index) {
                Some(tie) => (Some(tie), std::cmp::Reverse(0)),
                None => (None, std::cmp::Reverse(block_of(index))),
            })
            .collect();
        keys.sort_unstable();
        keys.dedup();
        let mut places = vec![None; params.len()];
        let bucket = |(place, (tie, std::cmp::Reverse(block)))| {
            let is_member = |index: usize| match tie {
                Some(_) => tie_of(index) == tie,
                None => tie_of(index).is_none() && block_of(index) == block,
            };
            let mut slots = Vec::new();
            let mut len = 0;
            for &param in trainable.iter().filter(|&&index| is_member(index)) {
                places[param] = Some((place, len));
                let range = len..len + params[param].num_values();
                len = range.end;
                slots.push(Slot { param, range });
            }
            let members = slots.iter().map(|slot| block_of(slot.param));
            Bucket {
                block: members.min().unwrap_or(block),
                tie,
                len: len.next_multiple_of(SLICE_ALIGNMENT * dp_world_size),
                slots,
            }
        };
        let buckets = keys.into_iter().enumerate().map(bucket).collect();
        Self { buckets, places }
    }

    /// The bucket of parameter `index` and the place of its first value there; `None` if it is frozen.
    pub fn place(&self, index: usize) -> Option<(usize, usize)> {
        self.places[index]
    }

    /// Buckets in the order in which a forward pass needs their parameters.
    pub fn in_forward_order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.buckets.len()).collect();
        order.sort_by_key(|&index| self.buckets[index].block);
        order
    }
}
