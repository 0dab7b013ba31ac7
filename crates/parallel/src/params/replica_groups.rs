//! The groups of ranks that data-parallel replicas work in.

use std::ops::Range;

use candle_comm::{Mesh, ProcessGroup};
use candle_core::{Device, Error, Result};

use super::layout::{Bucket, Sharing};
use crate::data_parallel::{DataParallel, ReduceType, ZeroStage};

/// The data-parallel ranks as a grid: those that divide everything between them, and those that hold the same slices.
pub(crate) struct ReplicaGroups {
    pub config: DataParallel,
    /// Ranks with the other slices of the same copy: one rank for ZeRO-0.
    pub shard: ProcessGroup,
    /// Ranks with the same slice of the other copies.
    pub replicate: ProcessGroup,
    /// A second communicator over the ranks of `shard`, for gathering weights tile by tile: on the first they would queue behind reductions of
    /// gradients.
    pub tiles: ProcessGroup,
    /// Of the ranks of `shard` those that divide a second copy of the weights, if there is one.
    pub secondary: Option<ProcessGroup>,
    /// Where quantized gradients are summed in two hops: a second communicator over the ranks of `secondary`, as on that one gathers of weights
    /// would queue behind them, and those with the same place in the other such groups.
    pub hops: Option<[ProcessGroup; 2]>,
    /// Whether a rank keeps its weights away from its device.
    pub offloads_weights: bool,
}

impl ReplicaGroups {
    /// Those of replica `rank` of `num_replicas`, which knows no other one.
    pub fn unconnected(
        config: DataParallel,
        offloads_weights: bool,
        rank: usize,
        num_replicas: usize,
    ) -> Result<Self> {
        config.validate(num_replicas)?;
        let len = config.num_slices(num_replicas);
        let group = |rank, len| ProcessGroup::unconnected(rank, len, Device::Cpu);
        let shard = group(rank % len, len);
        let secondary = config.zero_secondary;
        let secondary = secondary.map(|within| group(rank % within, within));
        let hops = config.num_hop_groups(len).zip(secondary.as_ref());
        Ok(Self {
            hops: hops.map(|(number, within)| {
                let across = group(rank % len / within.world_size(), number);
                [within.clone(), across]
            }),
            secondary,
            config,
            tiles: shard.clone(),
            shard,
            replicate: group(rank / len, num_replicas / len),
            offloads_weights,
        })
    }

    /// Splits `mesh.replicas`. Every rank must call it.
    pub fn new(config: DataParallel, offloads_weights: bool, mesh: &Mesh) -> Result<Self> {
        let dp = &mesh.replicas;
        config.validate(dp.world_size())?;
        let single = || ProcessGroup::single(dp.device().clone());
        let len = config.num_slices(dp.world_size());
        let (shard, replicate) = match len {
            1 => (single(), dp.clone()),
            len if len == dp.world_size() => (dp.clone(), single()),
            len => (
                dp.split(dp.rank() / len, dp.rank())?,
                dp.split(dp.rank() % len, dp.rank())?,
            ),
        };
        let tiles = match config.tile_linears {
            1 => single(),
            _ => shard.split(0, shard.rank())?,
        };
        let secondary = config.zero_secondary;
        let secondary = secondary.map(|len| shard.split(shard.rank() / len, shard.rank()));
        let secondary = secondary.transpose()?;
        let hops = config.num_hop_groups(len).and(secondary.as_ref());
        let hops = hops.map(|secondary| {
            let within = secondary.split(0, secondary.rank())?;
            let across = shard.split(shard.rank() % within.world_size(), shard.rank())?;
            Ok::<_, Error>([within, across])
        });
        Ok(Self {
            hops: hops.transpose()?,
            secondary,
            config,
            shard,
            replicate,
            tiles,
            offloads_weights,
        })
    }

    /// An error if one of the groups has failed; see [`ProcessGroup::check`].
    pub fn check(&self) -> Result<()> {
        let groups = [&self.shard, &self.replicate, &self.tiles].into_iter();
        groups
            .chain(&self.secondary)
            .chain(self.hops.iter().flatten())
            .try_for_each(ProcessGroup::check)
    }

    /// Whether a rank keeps its slice of the gradients only.
    pub fn shards_gradients(&self) -> bool {
        self.config.zero >= ZeroStage::Two && self.shard.world_size() > 1
    }

    /// Whether a rank keeps its slice of the weights only, which is all of them without replicas that divide something, and has those of a
    /// block in place for its passes only.
    pub fn shards_weights(&self) -> bool {
        let is_divided = self.config.zero == ZeroStage::Three && self.shard.world_size() > 1;
        is_divided || self.offloads_weights
    }

    /// Whether each pass moves something between replicas, so that all of them must make as many: weights, and of passes that train also
    /// gradients.
    pub fn moves_in_passes(&self, trains: bool) -> bool {
        let gathers_weights = self.shards_weights() && self.shard.world_size() > 1;
        gathers_weights || (trains && self.shards_gradients())
    }

    /// Whether other replicas update weights that this rank has whole.
    pub fn spreads_weights(&self) -> bool {
        self.shard.world_size() > 1 && !self.shards_weights()
    }

    /// Buckets of updated weights that may be on their way when an update is over.
    pub fn max_spreads(&self) -> u32 {
        match (self.config.overlap, self.shards_gradients()) {
            (false, _) => 0,
            // There are no buffers of whole buckets through which all weights could move at once.
            (true, true) => 2,
            (true, false) => u32::MAX,
        }
    }

    /// In what form the gradients of a bucket move; without replicas they do not.
    pub fn reduce_type(&self, bucket: &Bucket) -> ReduceType {
        let is_single = self.shard.world_size() == 1;
        match self.config.reduce {
            _ if is_single && self.replicate.world_size() == 1 => ReduceType::F32,
            reduce if reduce.quantized().is_some() && bucket.sharing != Sharing::None => {
                ReduceType::F32
            }
            reduce => reduce,
        }
    }

    /// This rank's slice of a bucket of `len` values.
    pub fn own_range(&self, len: usize) -> Range<usize> {
        self.range_of(self.shard.rank(), len)
    }

    /// This rank's slice within the sum of a bucket's gradients as it is kept, and the length of that sum: all `len` values, or the slice.
    pub fn own_part_of_sum(&self, len: usize) -> (Range<usize>, usize) {
        let own = self.own_range(len);
        if self.shards_gradients() {
            (0..own.len(), own.len())
        } else {
            (own, len)
        }
    }

    /// The slices of a bucket of `len` values that the ranks of [`Self::shard`] have, in their order.
    pub fn slices(&self, len: usize) -> Vec<Range<usize>> {
        let ranks = 0..self.shard.world_size();
        ranks.map(|rank| self.range_of(rank, len)).collect()
    }

    fn range_of(&self, rank: usize, len: usize) -> Range<usize> {
        let len = len / self.shard.world_size();
        rank * len..(rank + 1) * len
    }
}
