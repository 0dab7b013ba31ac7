//! A model as a chain of blocks, cut into stages that micro-batches flow through.

mod block;
mod border;
mod graph;
mod model_part;
mod plain;
mod runs;
mod stage_block;
mod weight_check;

pub use block::{Block, head_block, layer_block, plain_block, plain_head};
pub use border::{pack, unpack};
pub use model_part::ModelPart;
pub use plain::{PlainBlock, PlainHead};
pub(crate) use runs::{BackwardRun, ForwardRun, StageJobs, StageTape};
