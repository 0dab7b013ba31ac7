//! A model as a chain of blocks, cut into stages that micro-batches flow through.

mod block;
mod eval_sums;
mod graph;
mod inference;
mod input_check;
mod key_value_cache;
mod micro_batch;
mod pass_report;
#[expect(clippy::module_inception, reason = "the pipeline among its parts")]
mod pipeline;
mod recompute;
mod schedule;
mod segment;
mod stage;
mod weight_check;

pub use block::{Backward, Block, Pass, PlainBlock, layer_block, plain_block};
pub use eval_sums::EvalSums;
pub use key_value_cache::KeyValueCache;
pub use micro_batch::MicroBatch;
pub use pass_report::PassReport;
pub use pipeline::Pipeline;
pub use recompute::Recompute;
pub use schedule::{Instruction, Schedule};
pub use stage::{Stage, Tape, stage_blocks};
