//! Optimizers: the rules that update slices of parameters or whole matrices, and what divides them over the data-parallel ranks.

mod adamw;
mod bucket_update;
mod distributed;
mod loss_scaling;
mod master_weights;
#[expect(
    clippy::module_inception,
    reason = "the rule among what carries it out"
)]
mod optimizer;
mod param_group;
mod param_matrix;
mod rules;
mod state;
mod state_store;
mod training_state;

pub use adamw::{AdamW, AdamWConfig};
pub use distributed::{DistributedOptimizer, StepReport};
pub use loss_scaling::LossScaling;
pub use optimizer::{Needs, Optimizer, ParamSlice, SliceWeight, UpdateStep};
pub use param_group::ParamGroup;
pub use param_matrix::ParamMatrix;
pub use state::OptimizerState;
pub(crate) use state_store::{BucketShape, MASTER, StateSlices};
pub(crate) use training_state::OptimizerCounters;
