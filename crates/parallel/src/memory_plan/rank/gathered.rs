//! Weights that are here for their passes only: gathered, fetched, tile by tile.

use candle_core::DType;
use candle_ops::QuantizedType;

use super::{Gathered, PlannedRank, bytes};
use crate::memory::MemoryCategory;
use crate::params::{Bucket, Sharing, is_adopted};
use crate::placement::{intersect, part};

impl<'a> PlannedRank<'a> {
    pub(super) fn needed(&self, block: usize) -> Vec<usize> {
        self.needed.get(&block).cloned().unwrap_or_default()
    }

    fn bucket(&self, index: usize) -> &'a Bucket {
        let layout = &self.spec.layout;
        match index.checked_sub(layout.buckets.len()) {
            None => &layout.buckets[index],
            Some(frozen) => &layout.frozen[frozen],
        }
    }

    /// Whether the weights of a bucket are gathered in 8 bits.
    fn is_quantized(&self, bucket: &Bucket) -> bool {
        let moves = self.groups.shard.world_size() > 1 && self.groups.config.quantize_weights;
        moves && bucket.sharing == Sharing::None && bucket.dtype != DType::U8
    }

    pub(super) fn prefetch(&mut self, block: usize) {
        for index in self.needed(block) {
            let (bucket, gathered) = (self.bucket(index), self.gathered[index]);
            if gathered.on_the_way + gathered.present > 0 {
                continue;
            }
            let bytes = match (self.has_copy[index], self.groups.offloads_weights) {
                (true, _) => bytes(bucket),
                (false, true) => bytes(bucket) / self.groups.shard.world_size(),
                (false, false) => self.moved_bytes(bucket),
            };
            self.gathered[index].on_the_way = bytes;
            self.held.hold(MemoryCategory::Gathered, bytes);
        }
    }

    /// What ranks send of a bucket of weights, and what comes of it.
    fn moved_bytes(&self, bucket: &Bucket) -> usize {
        let num_slices = self.groups.shard.world_size();
        match self.is_quantized(bucket) {
            // And the copy that is sent.
            true => (num_slices + 1) * QuantizedType::Int8.row_bytes(bucket.len / num_slices),
            false => bytes(bucket),
        }
    }

    /// Gives the parameters of a bucket their values.
    pub(super) fn arrive(&mut self, index: usize) {
        let mut on_the_way = std::mem::take(&mut self.gathered[index].on_the_way);
        if on_the_way == 0 {
            return;
        }
        let bucket = self.bucket(index);
        let is_divided = self.groups.shard.world_size() > 1;
        if self.groups.offloads_weights && is_divided && !self.has_copy[index] {
            // The slice has come, and is gathered.
            let moved = self.moved_bytes(bucket);
            self.held.hold(MemoryCategory::Gathered, moved);
            self.held.free(MemoryCategory::Gathered, on_the_way);
            on_the_way = moved;
        }
        if let Some(secondary) = &self.groups.secondary
            && !std::mem::replace(&mut self.has_copy[index], true)
        {
            let part = bytes(bucket) / secondary.world_size();
            self.held.hold(MemoryCategory::Gathered, part);
        }
        let of_slots = bucket.slots.iter();
        let of_slots = of_slots.map(|slot| self.spec.params[slot.param].num_bytes());
        let (all, whole): (Vec<usize>, usize) = (of_slots.collect(), bytes(bucket));
        let others: usize = all.iter().skip(1).sum();
        let adopts = is_adopted(others, whole);
        let copied = if adopts { others } else { all.iter().sum() };
        self.held.free(MemoryCategory::Gathered, on_the_way);
        self.held.hold(MemoryCategory::Gathered, whole + copied);
        if !adopts {
            self.held.free(MemoryCategory::Gathered, whole);
        }
        self.gathered[index].present = if adopts { whole + copied } else { copied };
    }

    pub(super) fn free_bucket(&mut self, index: usize) {
        let Gathered {
            on_the_way,
            present,
        } = std::mem::take(&mut self.gathered[index]);
        self.held
            .free(MemoryCategory::Gathered, on_the_way + present);
    }

    pub(super) fn free_gathered(&mut self) {
        for index in 0..self.gathered.len() {
            self.free_bucket(index);
            if let Some(secondary) = &self.groups.secondary
                && std::mem::take(&mut self.has_copy[index])
            {
                let part = bytes(self.bucket(index)) / secondary.world_size();
                self.held.free(MemoryCategory::Gathered, part);
            }
        }
    }

    /// The weights of a block that come tile by tile.
    pub(super) fn use_tiles(&mut self, block: usize) {
        let spec = self.spec;
        if !self.groups.shards_weights() {
            return;
        }
        for bucket in spec.layout.all().filter(|bucket| bucket.is_tiled) {
            let is_quantized = self.is_quantized(bucket);
            for slot in &bucket.slots {
                let param = &spec.params[slot.param];
                if !param.blocks.contains(&block) {
                    continue;
                }
                let num_rows = param.shape.first().copied().unwrap_or(1);
                let num_tiles = self.groups.config.tile_linears.min(num_rows).max(1);
                let width = slot.range.len() / num_rows.max(1);
                let tile = |index| {
                    let rows = part(num_rows, index, num_tiles);
                    let start = slot.range.start;
                    self.tile(
                        bucket,
                        &(start + rows.start * width..start + rows.end * width),
                        is_quantized,
                    )
                };
                let tiles: Vec<PlannedTile> = (0..num_tiles).map(tile).collect();
                self.go_through(&tiles);
            }
        }
    }

    /// Some values of a bucket that are gathered together.
    fn tile(
        &self,
        bucket: &Bucket,
        range: &std::ops::Range<usize>,
        is_quantized: bool,
    ) -> PlannedTile {
        let slices = self.groups.slices(bucket.len).into_iter().enumerate();
        let pieces = slices.map(|(rank, slice)| (rank, intersect(range, &slice).len()));
        let pieces: Vec<_> = pieces.filter(|(_, len)| *len > 0).collect();
        let received = pieces.iter();
        let received = received.filter(|(rank, _)| *rank != self.groups.shard.rank());
        let received = received.map(|(_, len)| match is_quantized {
            true => QuantizedType::Int8.row_bytes(*len),
            false => len * bucket.dtype.size_in_bytes(),
        });
        let values = range.len() * bucket.dtype.size_in_bytes();
        // Between ranks, what comes from away is there until it is sent.
        let sends = self.groups.offloads_weights && self.groups.shard.world_size() > 1;
        let mut own = pieces.iter().filter(|_| sends);
        let own = own.find(|(rank, _)| *rank == self.groups.shard.rank());
        let fetched = own.map_or(0, |(_, len)| len * bucket.dtype.size_in_bytes());
        PlannedTile {
            values,
            on_the_way: values + received.sum::<usize>() + fetched,
            joined: if pieces.len() > 1 { values } else { 0 },
        }
    }

    fn go_through(&mut self, tiles: &[PlannedTile]) {
        let (gathered, overlap) = (MemoryCategory::Gathered, self.groups.config.overlap);
        for (index, tile) in tiles.iter().enumerate() {
            if index == 0 || !overlap {
                self.held.hold(gathered, tile.on_the_way);
            }
            self.held.hold(gathered, tile.joined);
            self.held.free(gathered, tile.on_the_way);
            self.held.hold(gathered, tile.values);
            self.held.free(gathered, tile.joined);
            if let Some(next) = tiles.get(index + 1).filter(|_| overlap) {
                self.held.hold(gathered, next.on_the_way);
            }
            self.held.free(gathered, tile.values);
        }
    }
}

/// Bytes of a tile: in use, on its way, and joined of what several ranks sent.
struct PlannedTile {
    values: usize,
    on_the_way: usize,
    joined: usize,
}
