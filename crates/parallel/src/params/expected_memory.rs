//! What a rank will hold at most besides what it holds before its first step: weights that are gathered, and buffers that exist for
//! communication alone. See `docs/design.md`, "What a rank holds".

use std::collections::{BTreeMap, BTreeSet};

use super::{Bucket, Parameters, ReduceType};
use crate::memory::{MemoryCategory, MemoryReport, MemoryUse};

/// Bytes of a gradient.
const GRADIENT_BYTES: usize = 4;
/// What a tile exists as at a time: in use, on its way, and joined of what several ranks sent.
const COPIES_OF_TILE: usize = 3;

impl Parameters {
    /// The most that this rank is expected to hold of each category, if its tapes hold so many bytes of `activations`: of weights, gradients
    /// and optimizer what it holds now.
    pub fn expected_memory(&self, activations: usize) -> MemoryReport {
        let report = self.meter().report();
        MemoryReport::new(|category| {
            let now = report.of(category).now;
            let peak = match category {
                MemoryCategory::Activations => activations as u64,
                MemoryCategory::Gathered => self.expected_gathered() as u64,
                MemoryCategory::Buffers => self.expected_buffers() as u64,
                _ => now,
            };
            MemoryUse { now, peak }
        })
    }

    /// With ZeRO-3 the weights of a block and of the next one, or those of one with the buffer that it came in.
    fn expected_gathered(&self) -> usize {
        let (layout, groups) = (self.layout(), self.groups());
        if !groups.shards_weights() {
            return 0;
        }
        let buckets: Vec<&Bucket> = layout.all().collect();
        let bytes = |index: usize| buckets[index].len * buckets[index].dtype.size_in_bytes();
        let mut of_block: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
        let mut tiled = 0;
        for (index, bucket) in buckets.iter().enumerate() {
            for slot in &bucket.slots {
                if bucket.is_tiled {
                    let weight = slot.range.len() * bucket.dtype.size_in_bytes();
                    let tile = weight.div_ceil(groups.config.tile_linears);
                    tiled = tiled.max(COPIES_OF_TILE * tile);
                    continue;
                }
                for &block in &self.get(slot.param).blocks {
                    of_block.entry(block).or_default().insert(index);
                }
            }
        }
        let of_block: Vec<BTreeSet<usize>> = of_block.into_values().collect();
        let sum = |set: &BTreeSet<usize>| set.iter().map(|&index| bytes(index)).sum::<usize>();
        let arriving = of_block.iter().map(|set| {
            let copied = set
                .iter()
                .filter(|&&index| !self.is_adopted(buckets[index]));
            sum(set) + copied.map(|&index| bytes(index)).max().unwrap_or(0)
        });
        let pairs = of_block.windows(2).filter(|_| groups.config.overlap);
        let pairs = pairs.map(|pair| sum(&pair[0].union(&pair[1]).copied().collect()));
        tiled + arriving.chain(pairs).max().unwrap_or(0)
    }

    /// Whole buckets of gradients that are divided, of weights on their way from the ranks that updated them, and copies in fewer bits: those
    /// of a block and of the next one, and of parameters that several blocks use, whose gradients are whole from the first of these to the last.
    fn expected_buffers(&self) -> usize {
        let (layout, groups) = (self.layout(), self.groups());
        let num_slices = groups.shard.world_size();
        let is_shared = |bucket: &&Bucket| {
            let mut slots = bucket.slots.iter();
            slots.any(|slot| self.get(slot.param).blocks.len() > 1)
        };
        let (shared, own): (Vec<&Bucket>, Vec<&Bucket>) =
            layout.buckets.iter().partition(is_shared);
        let at_a_time = |of: &dyn Fn(&Bucket) -> usize| {
            let mut of_block: BTreeMap<usize, usize> = BTreeMap::new();
            for bucket in &own {
                *of_block.entry(bucket.block).or_default() += of(bucket);
            }
            let of_block: Vec<usize> = of_block.into_values().collect();
            let num_blocks = (1 + usize::from(groups.config.overlap)).min(of_block.len().max(1));
            let together = of_block
                .windows(num_blocks)
                .map(|blocks| blocks.iter().sum());
            together.max().unwrap_or(0)
        };
        let copy = |bucket: &Bucket| match groups.reduce_type(bucket) {
            ReduceType::F32 => 0,
            ReduceType::Bf16 => 2 * (bucket.len + bucket.len / num_slices),
            // Each 256 values have a scale, of 4 bytes.
            ReduceType::Int8 => 2 * bucket.len * 260 / 256,
        };
        let gradients = match groups.shards_gradients() {
            true => {
                let shared = shared.iter().map(|bucket| GRADIENT_BYTES * bucket.len);
                at_a_time(&|bucket| GRADIENT_BYTES * bucket.len + copy(bucket))
                    + shared.sum::<usize>()
            }
            false => at_a_time(&copy),
        };
        let bytes = |bucket: &Bucket| bucket.len * bucket.dtype.size_in_bytes();
        let weights = match (
            num_slices > 1 && !groups.shards_weights(),
            groups.shards_gradients(),
        ) {
            (false, _) => 0,
            (true, true) => at_a_time(&bytes),
            // They pass through the buffers of gradients, if these are of their type; the others come all at once.
            (true, false) => {
                let narrow = layout.buckets.iter();
                let narrow = narrow.filter(|bucket| bucket.dtype.size_in_bytes() < GRADIENT_BYTES);
                narrow.map(bytes).sum()
            }
        };
        gradients.max(weights)
    }

    /// Whether a weight takes the buffer over that it came in, because it is nearly all of it.
    fn is_adopted(&self, bucket: &Bucket) -> bool {
        let bytes = |param: usize| self.get(param).num_bytes();
        let others = bucket.slots.iter().skip(1);
        let others: usize = others.map(|slot| bytes(slot.param)).sum();
        crate::params::is_adopted(others, bucket.len * bucket.dtype.size_in_bytes())
    }
}
