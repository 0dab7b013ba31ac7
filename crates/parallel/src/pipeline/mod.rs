//! A model as a chain of blocks, cut into stages that micro-batches flow through.

mod block;
mod border;
mod channels;
mod eval_sums;
mod graph;
mod inference;
mod input_check;
mod model_part;
#[expect(clippy::module_inception, reason = "the pipeline among its parts")]
mod pipeline;
mod plain;
mod stage_block;
mod units;
mod weight_check;

pub use block::{Block, head_block, layer_block, plain_block, plain_head};
pub use border::{pack, unpack};
pub use eval_sums::EvalSums;
pub use model_part::ModelPart;
pub use pipeline::Pipeline;
pub use plain::{PlainBlock, PlainHead};
