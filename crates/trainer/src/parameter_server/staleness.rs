//! How far workers were ahead of each other.

use serde::{Deserialize, Serialize};

/// Steps by which workers were ahead of the slowest one when their gradients were applied, over the gradients of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Staleness {
    /// On average.
    pub mean: f64,
    /// The most.
    pub max: usize,
}
