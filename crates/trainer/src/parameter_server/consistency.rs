//! When workers get updated weights, and how far they were ahead of each other.

use serde::{Deserialize, Serialize};

/// When the workers of a [`ParameterServer`](super::ParameterServer) get updated weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Consistency {
    /// When the gradients of all workers are there: their sum, in the order of the workers, is one update, that of data parallelism. A
    /// worker that is gone ends the run.
    Synchronous,
    /// Stale synchronous parallel (Ho et al., NIPS 2013): the gradient of each worker is an update when it comes, clipped by itself,
    /// with the learning rate of its step divided by the root of the number of workers and the optimizer's constants for [smaller
    /// batches](candle_parallel::AdamWConfig::scaled_to_batches), so that an epoch takes the weights about as far. A worker that is gone is
    /// dropped, and so are its samples.
    Asynchronous {
        /// Steps by which a worker may be ahead of the slowest one that lives.
        max_staleness: usize,
    },
}

/// Steps by which workers were ahead of the slowest one when their gradients were applied, over the gradients of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Staleness {
    /// On average.
    pub mean: f64,
    /// The most.
    pub max: usize,
}
