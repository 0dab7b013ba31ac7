//! What a step did.

use candle_parallel::{ContextRank, StepReport};

use super::Staleness;

/// What a step did, whether this rank's passes or workers computed its gradients.
pub(crate) struct StepDone {
    pub report: StepReport,
    /// Positions of the global batch, with a target or not.
    pub num_positions: usize,
    /// What context-parallel ranks have computed.
    pub context: Vec<ContextRank>,
    pub staleness: Option<Staleness>,
}
