//! What the passes of a step gave and how long they took.

use std::time::{Duration, Instant};

/// Result of [`crate::Pipeline::forward_backward`] on one stage.
#[derive(Clone, Copy, Debug, Default)]
pub struct PassReport {
    /// Sum of the losses of this replica's targets, not divided; `None` but on the last stage.
    pub loss_sum: Option<f64>,
    /// Time spent in forward passes, without waiting for other ranks.
    pub forward_secs: f64,
    /// Time spent in backward passes, without waiting for other ranks.
    pub backward_secs: f64,
}

/// Measures time without that spent waiting for other ranks.
pub(crate) struct ComputeTimer {
    start: Instant,
    waited: Duration,
}

impl ComputeTimer {
    pub fn start() -> Self {
        Self {
            start: Instant::now(),
            waited: candle_comm::waited(),
        }
    }

    pub fn secs(&self) -> f64 {
        let waited = candle_comm::waited().saturating_sub(self.waited);
        self.start.elapsed().saturating_sub(waited).as_secs_f64()
    }
}
