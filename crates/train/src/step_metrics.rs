//! What is known about one optimizer step.

use candle_parallel::MemoryReport;
use serde::{Deserialize, Serialize};

/// Numbers of one optimizer step, over all ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Step, counted from 0.
    pub step: usize,
    /// Cross-entropy in nats, averaged over all target tokens of the global batch.
    pub loss: f64,
    /// L2 norm of all gradients before clipping.
    pub grad_norm: f64,
    /// Learning rate the step used.
    pub learning_rate: f64,
    /// Target tokens of the global batch.
    pub num_tokens: usize,
    /// `num_tokens / step_secs`.
    pub tokens_per_sec: f64,
    /// Wall-clock time of the step, in seconds.
    pub step_secs: f64,
    /// Bytes that this rank holds after the step, and the most since the run began.
    pub memory: MemoryReport,
}
