//! How attention heads are divided over tensor-parallel ranks.

use candle_comm::ProcessGroup;
use candle_core::{Result, bail};
use candle_ops::HeadGroups;

use crate::placement::{Shard, part};

/// The query heads of a rank and the key/value heads they read (grouped-query attention, arXiv:2305.13245).
///
/// Query heads are divided into contiguous parts that differ by at most one head. A rank holds every key/value head that
/// one of its query heads reads, so a head may live on several ranks: its gradients are then summed over them.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct HeadPartition {
    /// Query heads held here; indices are heads.
    pub query: Shard,
    /// Key/value heads held here; indices are heads.
    pub key_value: Shard,
    /// Which local key/value head each local query head reads.
    pub groups: HeadGroups,
}

impl HeadPartition {
    /// Divides `num_heads` query heads, which read `num_kv_heads` key/value heads, over the group.
    ///
    /// # Errors
    /// Numbers of heads that do not fit each other, or fewer query heads than ranks.
    pub fn new(num_heads: usize, num_kv_heads: usize, group: &ProcessGroup) -> Result<Self> {
        let (rank, world_size) = (group.rank(), group.world_size());
        if num_kv_heads == 0 || !num_heads.is_multiple_of(num_kv_heads) {
            bail!(
                "num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads ({num_kv_heads}): each \
                 key/value head must be read by the same number of query heads"
            );
        }
        if num_heads < world_size {
            bail!(
                "tp({world_size}) > num_attention_heads({num_heads}): each tensor-parallel rank needs at least one \
                 query head\nhint: use tp <= {num_heads}"
            );
        }
        let size = num_heads / num_kv_heads;
        let heads_read = |rank: usize| {
            let query = part(num_heads, rank, world_size);
            query.start / size..query.end.div_ceil(size)
        };
        let query = part(num_heads, rank, world_size);
        Ok(Self {
            groups: HeadGroups {
                size,
                offset: query.start % size,
            },
            query: Shard::of_ranks(0, num_heads, group, |rank| {
                part(num_heads, rank, world_size)
            }),
            key_value: Shard::of_ranks(0, num_kv_heads, group, heads_read),
        })
    }
}
