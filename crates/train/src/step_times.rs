//! Where the time of a step goes.

use serde::{Deserialize, Serialize};

/// Wall-clock time of the parts of one step on one rank; waiting for other ranks counts as communication only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepTimes {
    /// Forward passes.
    pub forward_secs: f64,
    /// Backward passes.
    pub backward_secs: f64,
    /// Waiting for collectives and messages, wherever in the step.
    pub communication_secs: f64,
    /// Reduction, norm, clipping and update.
    pub optimizer_secs: f64,
}
