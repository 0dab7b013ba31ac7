//! Carries out what a rank does in a step, action by action.

mod channels;
mod eval_sums;
mod executor;
mod inference;
mod input_check;
mod messages;
mod pipeline;
mod reduce;
mod training;
mod units;
mod update;

pub use eval_sums::EvalSums;
pub use pipeline::Pipeline;
pub use training::Training;
