//! What a pass of a micro-batch through a model asks, and what it gives back: gradients of weights and losses.

mod cut;
mod dropout;
mod gradient_sink;
mod key_value_cache;
mod loss;
#[expect(clippy::module_inception, reason = "the pass among its parts")]
mod pass;
mod pass_report;
mod reports;
mod weight_jobs;

pub(crate) use dropout::Dropout;
pub use gradient_sink::{GradientSink, WeightGrad, WeightHalf};
pub use key_value_cache::KeyValueCache;
pub use loss::Loss;
pub use pass::Pass;
pub(crate) use pass_report::{ComputeTimer, Occupation};
pub use pass_report::{ContextRank, PassReport, PipelineRank};
pub(crate) use reports::Reported;
pub(crate) use weight_jobs::{Early, InputHalf, WeightJobs};
