//! Tensor-parallel layers, one implementation each: see [`Layer`].

mod column_parallel_linear;
mod head;
mod head_by_tiles;
mod head_partition;
mod layer;
mod layer_ranks;
mod linear;
mod low_rank;
pub mod regions;
mod row_parallel_linear;
mod vocab_parallel_cross_entropy;
mod vocab_parallel_embedding;
mod vocab_parallel_head;

pub use column_parallel_linear::{
    ColumnParallelLinear, column_parallel_backward, column_parallel_forward,
    column_parallel_linear, column_parallel_linear_shard, column_parallel_tape,
};
pub use head::Head;
pub use head_partition::HeadPartition;
pub use layer::Layer;
pub use layer_ranks::LayerRanks;
pub use low_rank::LowRank;
pub use row_parallel_linear::{RowParallelLinear, row_parallel_linear, row_parallel_linear_shard};
pub use vocab_parallel_cross_entropy::{
    linear_cross_entropy, linear_predictions, vocab_parallel_cross_entropy,
};
pub use vocab_parallel_embedding::{VocabParallelEmbedding, vocab_parallel_embedding};
pub use vocab_parallel_head::{VocabParallelHead, vocab_parallel_head};
