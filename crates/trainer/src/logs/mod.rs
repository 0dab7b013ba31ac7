//! What a run tells of its steps: numbers, and the files and lines that have them.

pub(crate) mod metrics_file;
mod model_flops;
mod progress;
pub(crate) mod step_debug;
pub(crate) mod step_metrics;
mod step_times;
mod tensorboard;

pub use metrics_file::{Metrics, MetricsLine};
pub use model_flops::ModelFlops;
pub use progress::Progress;
pub use step_metrics::StepMetrics;
pub use step_times::StepTimes;
pub use tensorboard::TensorBoard;
