//! What the passes of a step gave and how long they took.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::reports::Reported;

/// Result of [`Pipeline::forward_backward`](crate::Pipeline::forward_backward) on one stage: what a program may want to print. The step's loss and gradients come
/// from [`Gradients`](crate::Gradients), which count all passes of the step.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct PassReport {
    /// Sum of the losses of this replica's targets, of a context-parallel rank those of its rows, not divided, an f64 scalar on the stage's device; `None` but on the last
    /// stage. To read it is to wait for a GPU.
    pub loss_sum: Option<Tensor>,
    /// Number of these targets, over all micro-batches, on the last stage; 0 on the others.
    pub num_targets: f64,
    /// What this rank's blocks have reported, by name.
    pub(crate) reported: BTreeMap<String, Reported>,
    /// Time spent in forward passes, without waiting for other ranks; with a GPU, time to tell it what to do.
    pub forward_secs: f64,
    /// The same for backward passes.
    pub backward_secs: f64,
    /// Time from the first pass of the step to the last one, waiting for other ranks included.
    pub passes_secs: f64,
    /// What each context-parallel rank computes of this replica's micro-batches; empty without context parallelism. The same on all of them.
    pub context: Vec<ContextRank>,
    /// How much of the passes' time this rank computes; `None` where nobody knows.
    pub(crate) occupation: Option<Occupation>,
}

/// What a rank of a pipeline does in the passes of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PipelineRank {
    /// The share of the time from the first pass of all ranks to the last in which it computes nothing. On a GPU that of the step before, by its
    /// own clock, if [`Pipeline::take_device_secs`](crate::Pipeline::take_device_secs) was asked after that; else `None`: the host waits for
    /// nothing to know it.
    pub idle_share: Option<f64>,
    /// The most bytes of activations since the run began, where they are measured: see
    /// [`MemoryCategory::Activations`](crate::MemoryCategory::Activations).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_activations_bytes: Option<u64>,
}

/// What a context-parallel rank computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ContextRank {
    /// Rows of sequences.
    pub num_rows: usize,
    /// Pairs of a query of its own and a key that it sees, in layers without a window: what attention takes time for.
    pub num_pairs: usize,
}

/// Seconds of passes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Occupation {
    /// In which a rank computes.
    pub busy: f64,
    /// All of them.
    pub whole: f64,
}

impl Occupation {
    /// With that of more passes.
    pub fn plus(self, other: Self) -> Self {
        Self {
            busy: self.busy + other.busy,
            whole: self.whole + other.whole,
        }
    }
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
