//! Parallel layers, tape, pipeline, gradients, ZeRO optimizer and checkpoints for candle.
#![deny(unsafe_code)]

pub mod checkpoint;
pub mod regions;

mod adamw;
mod block;
mod column_parallel_linear;
mod flat_buffer;
mod gradients;
mod head_partition;
mod init;
mod master_weights;
mod micro_batch;
mod optimizer;
mod param;
mod param_builder;
mod param_store;
mod parameters;
mod pass_report;
mod pipeline;
mod row_parallel_linear;
mod schedule;
mod shard;
mod stage;
mod vocab_parallel_cross_entropy;
mod vocab_parallel_embedding;

pub use adamw::AdamWConfig;
pub use block::{Backward, Block, TrainPass};
pub use column_parallel_linear::{
    ColumnParallelLinear, column_parallel_backward, column_parallel_linear,
    column_parallel_linear_shard,
};
pub use gradients::Gradients;
pub use head_partition::HeadPartition;
pub use micro_batch::MicroBatch;
pub use optimizer::{Optimizer, ParamMoments, ReducedGradients, ReducedLoss, ZeroStage};
pub use param::Param;
pub use param_builder::{ParamBuilder, WEIGHT_INIT};
pub use param_store::ParamStore;
pub use parameters::{CatalogEntry, Holder, Parameters};
pub use pass_report::PassReport;
pub use pipeline::Pipeline;
pub use row_parallel_linear::{RowParallelLinear, row_parallel_linear, row_parallel_linear_shard};
pub use schedule::{Instruction, Schedule};
pub use shard::{Shard, part};
pub use stage::{Stage, Tape, stage_blocks};
pub use vocab_parallel_cross_entropy::{linear_cross_entropy, vocab_parallel_cross_entropy};
pub use vocab_parallel_embedding::{VocabParallelEmbedding, vocab_parallel_embedding};
