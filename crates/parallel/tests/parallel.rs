//! Schedules, layers, tape, gradients, optimizer and checkpoints against plain references, on threads.

#[path = "parallel/alike.rs"]
mod alike;
#[path = "parallel/building.rs"]
mod building;
#[path = "parallel/chain.rs"]
mod chain;
#[path = "parallel/check.rs"]
mod check;
#[path = "parallel/cross_entropy.rs"]
mod cross_entropy;
#[path = "parallel/device.rs"]
mod device;
#[path = "parallel/dropout.rs"]
mod dropout;
#[path = "parallel/embedding.rs"]
mod embedding;
#[path = "parallel/explicit.rs"]
mod explicit;
#[path = "parallel/export.rs"]
mod export;
#[path = "parallel/folder.rs"]
mod folder;
#[path = "parallel/frozen_format.rs"]
mod frozen_format;
#[path = "parallel/half_precision.rs"]
mod half_precision;
#[path = "parallel/halves.rs"]
mod halves;
#[path = "parallel/head_partition.rs"]
mod head_partition;
#[path = "parallel/inputs.rs"]
mod inputs;
#[path = "parallel/linear.rs"]
mod linear;
#[path = "parallel/linear_cross_entropy.rs"]
mod linear_cross_entropy;
#[path = "parallel/lora.rs"]
mod lora;
#[path = "parallel/loss_scaling.rs"]
mod loss_scaling;
#[path = "parallel/memory.rs"]
mod memory;
#[path = "parallel/mistaken.rs"]
mod mistaken;
#[path = "parallel/mistakes.rs"]
mod mistakes;
#[path = "parallel/misuse.rs"]
mod misuse;
#[path = "parallel/non_finite.rs"]
mod non_finite;
#[path = "parallel/offload.rs"]
mod offload;
#[path = "parallel/optimizer.rs"]
mod optimizer;
#[path = "parallel/optimizer_matrix.rs"]
mod optimizer_matrix;
#[path = "parallel/optimizer_rule.rs"]
mod optimizer_rule;
#[path = "parallel/output_folder.rs"]
mod output_folder;
#[path = "parallel/overlap.rs"]
mod overlap;
#[path = "parallel/own_blocks.rs"]
mod own_blocks;
#[path = "parallel/param_store.rs"]
mod param_store;
#[path = "parallel/placement.rs"]
mod placement;
#[path = "parallel/plain_blocks.rs"]
mod plain_blocks;
#[path = "parallel/rank.rs"]
mod rank;
#[path = "parallel/reader.rs"]
mod reader;
#[path = "parallel/reduce_mean.rs"]
mod reduce_mean;
#[path = "parallel/regions.rs"]
mod regions;
#[path = "parallel/released.rs"]
mod released;
#[path = "parallel/save.rs"]
mod save;
#[path = "parallel/save_exact.rs"]
mod save_exact;
#[path = "parallel/save_failures.rs"]
mod save_failures;
#[path = "parallel/schedule.rs"]
mod schedule;
#[path = "parallel/set_weights.rs"]
mod set_weights;
#[path = "parallel/sharded.rs"]
mod sharded;
#[path = "parallel/stage.rs"]
mod stage;
#[path = "parallel/tiles.rs"]
mod tiles;
#[path = "parallel/traffic.rs"]
mod traffic;
#[path = "parallel/training_checkpoint.rs"]
mod training_checkpoint;
#[path = "parallel/training_checkpoint_faults.rs"]
mod training_checkpoint_faults;
