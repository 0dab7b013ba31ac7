//! The ranks over which a layer is divided.

use candle_comm::ProcessGroup;

use crate::context_parallel::ContextParallel;
use crate::pass::Region;

/// The ranks over which a layer is divided: its weights, and the rows that it computes.
#[derive(Clone)]
pub struct LayerRanks {
    /// Ranks that have other parts of the layer's weights, and what they have outside of the region in which they compute with these.
    pub region: Region,
    /// Ranks that have other parts of the sequences, and how attention comes to what they have.
    pub context: ContextParallel,
}

impl LayerRanks {
    /// The tensor-parallel ranks of this group, for whole sequences.
    pub fn tensor_parallel(tp: &ProcessGroup) -> Self {
        Self {
            region: tp.into(),
            context: ContextParallel::none(tp.device()),
        }
    }
}
