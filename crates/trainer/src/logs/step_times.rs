//! Where the time of a step goes.

use serde::{Deserialize, Serialize};

/// Wall-clock time of the parts of one step on one rank; waiting for other ranks counts as communication only.
///
/// It is the host's time. The host only tells a GPU what to do until it reads norm and loss, so there most of a step counts as the
/// optimizer's; after [`Trainer::with_device_times`](crate::Trainer::with_device_times) the passes' and the optimizer's times are the
/// GPU's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StepTimes {
    /// Forward passes.
    pub forward_secs: f64,
    /// Backward passes.
    pub backward_secs: f64,
    /// Waiting for collectives and messages, wherever in the step.
    pub communication_secs: f64,
    /// Communication that was under way while the rank did not wait, since the step before ended: hidden under computation. Not on
    /// GPUs, whose streams hide it where the host does not see.
    pub hidden_communication_secs: f64,
    /// Reduction, norm, clipping and update.
    pub optimizer_secs: f64,
}
