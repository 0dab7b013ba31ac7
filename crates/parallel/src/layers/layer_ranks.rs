//! The ranks over which a layer is divided.

use candle_comm::{Mesh, ProcessGroup};

use crate::context_parallel::ContextParallel;

/// The ranks over which a layer is divided: its weights, and the rows that it computes.
#[derive(Clone)]
pub struct LayerRanks {
    /// Ranks that have other parts of the layer's weights.
    pub tp: ProcessGroup,
    /// Ranks that have other parts of the sequences, and how attention comes to what they have.
    pub context: ContextParallel,
}

impl LayerRanks {
    /// The tensor-parallel ranks of this group, for whole sequences.
    pub fn tensor_parallel(tp: &ProcessGroup) -> Self {
        Self {
            tp: tp.clone(),
            context: ContextParallel::none(tp.device()),
        }
    }

    /// Those of a mesh.
    pub fn new(mesh: &Mesh, context: ContextParallel) -> Self {
        Self {
            tp: mesh.tp.clone(),
            context,
        }
    }
}
