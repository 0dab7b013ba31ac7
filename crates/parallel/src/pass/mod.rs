//! What a pass of a micro-batch through a model asks, what stays of it until the backward pass, and what it gives back:
//! gradients of weights and losses.

mod context_rows;
mod cut;
mod dropout;
mod gradient_sink;
mod key_value_cache;
mod loss;
#[expect(clippy::module_inception, reason = "the pass among its parts")]
mod pass;
mod pass_report;
mod recompute;
mod region;
mod region_watch;
mod reports;
mod tape;
mod weight_jobs;

pub(crate) use context_rows::ContextRows;
pub(crate) use dropout::Dropout;
pub use gradient_sink::{GradientSink, WeightGrad, WeightHalf};
pub use key_value_cache::KeyValueCache;
pub use loss::Loss;
pub use pass::Pass;
pub(crate) use pass_report::{ComputeTimer, Occupation};
pub use pass_report::{ContextRank, PassReport, PipelineRank};
pub use recompute::Recompute;
pub(crate) use recompute::{check_repeats, fingerprint};
pub use region::Region;
pub(crate) use region_watch::{SeenRegions, is_each_the_whole, note_entered, note_sum, watched};
pub(crate) use reports::Reported;
pub use tape::Tape;
pub(crate) use weight_jobs::{Early, InputHalf, WeightJobs};
