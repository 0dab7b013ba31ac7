//! Parallel layers, tape, pipeline, gradients, ZeRO optimizer and checkpoints for candle.
#![deny(unsafe_code)]

pub mod checkpoint;
mod gradients;
mod layers;
mod optimizer;
mod params;
mod pipeline;

pub use gradients::{DataParallel, Gradients, ReducedGradients, ReducedLoss, ZeroStage};
pub use layers::{
    ColumnParallelLinear, GradientSink, HeadPartition, Layer, RowParallelLinear,
    VocabParallelEmbedding, column_parallel_backward, column_parallel_linear,
    column_parallel_linear_shard, in_graph, linear_cross_entropy, regions, row_parallel_linear,
    row_parallel_linear_shard, vocab_parallel_cross_entropy, vocab_parallel_embedding,
};
pub use optimizer::{
    AdamW, AdamWConfig, DistributedOptimizer, Optimizer, OptimizerState, ParamGroup, ParamSlice,
    SliceWeight, StepReport, UpdateStep,
};
pub use params::{
    CatalogEntry, Gradient, Holder, Param, ParamBuilder, ParamStore, Parameters, Placement, Shard,
    WEIGHT_INIT, part,
};
pub use pipeline::{
    Backward, Block, Instruction, MicroBatch, Pass, PassReport, Pipeline, PlainBlock, Schedule,
    Stage, Tape, layer_block, plain_block, stage_blocks,
};
