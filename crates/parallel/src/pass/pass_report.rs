//! What the passes of a step gave and how long they took.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use candle_core::Tensor;

use super::reports::Reported;

/// Result of [`Pipeline::forward_backward`](crate::Pipeline::forward_backward) on one stage: what a program may want to print. The step's loss and gradients come
/// from [`Gradients`](crate::Gradients), which count all passes of the step.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct PassReport {
    /// Sum of the losses of this replica's targets, not divided, an f64 scalar on the stage's device; `None` but on the last
    /// stage. To read it is to wait for a GPU.
    pub loss_sum: Option<Tensor>,
    /// Number of this replica's targets, over all micro-batches, on the last stage; 0 on the others.
    pub num_targets: f64,
    /// What this rank's blocks have reported, by name.
    pub(crate) reported: BTreeMap<String, Reported>,
    /// Time spent in forward passes, without waiting for other ranks; with a GPU, time to tell it what to do.
    pub forward_secs: f64,
    /// The same for backward passes.
    pub backward_secs: f64,
    /// Time from the first pass of the step to the last one, waiting for other ranks included.
    pub passes_secs: f64,
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
