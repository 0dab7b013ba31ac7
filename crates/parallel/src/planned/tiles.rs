//! Weights that come tile by tile.

use std::ops::Range;

use candle_ops::QuantizedType;

use super::bytes::RankBytes;
use crate::params::Bucket;
use crate::placement::{intersect, part};

/// Bytes of a tile: in use, on its way, and joined of what several ranks sent.
pub(super) struct PlannedTile {
    pub values: usize,
    pub on_the_way: usize,
    pub joined: usize,
}

impl PlannedTile {
    /// The tiles of each weight that a block uses tile by tile.
    pub fn of_block(rank: &RankBytes<'_>, block: usize) -> Vec<Vec<Self>> {
        let mut all = Vec::new();
        let buckets = rank.setup.spec.layout.all();
        for bucket in buckets.filter(|bucket| rank.setup.comes_in_tiles(bucket)) {
            for slot in &bucket.slots {
                let param = &rank.setup.spec.params[slot.param];
                if !param.blocks.contains(&block) {
                    continue;
                }
                let num_rows = param.shape.first().copied().unwrap_or(1);
                let num_tiles = rank.setup.groups.config.tile_linears.min(num_rows).max(1);
                let width = slot.range.len() / num_rows.max(1);
                let tile = |index| {
                    let rows = part(num_rows, index, num_tiles);
                    let start = slot.range.start;
                    let values = start + rows.start * width..start + rows.end * width;
                    Self::new(rank, bucket, &values)
                };
                all.push((0..num_tiles).map(tile).collect());
            }
        }
        all
    }

    /// Some values of a bucket that are gathered together.
    fn new(rank: &RankBytes<'_>, bucket: &Bucket, range: &Range<usize>) -> Self {
        let (shard, own_rank) = (&rank.setup.groups.shard, rank.setup.groups.shard.rank());
        let is_quantized = rank.is_quantized(bucket);
        let slices = rank.setup.groups.slices(bucket.len).into_iter().enumerate();
        let pieces = slices.map(|(of, slice)| (of, intersect(range, &slice).len()));
        let pieces: Vec<_> = pieces.filter(|(_, len)| *len > 0).collect();
        let received = pieces.iter().filter(|(of, _)| *of != own_rank);
        let received = received.map(|(_, len)| match is_quantized {
            true => QuantizedType::Int8.row_bytes(*len),
            false => len * bucket.dtype.size_in_bytes(),
        });
        let values = range.len() * bucket.dtype.size_in_bytes();
        // Between ranks, what comes from away is there until it is sent.
        let sends = rank.setup.groups.offloads_weights && shard.world_size() > 1;
        let mut own = pieces.iter().filter(|_| sends);
        let own = own.find(|(of, _)| *of == own_rank);
        let fetched = own.map_or(0, |(_, len)| len * bucket.dtype.size_in_bytes());
        Self {
            values,
            on_the_way: values + received.sum::<usize>() + fetched,
            joined: if pieces.len() > 1 { values } else { 0 },
        }
    }
}
