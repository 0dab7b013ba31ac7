//! What one device will hold of a model that is not built, by the table of `docs/design.md`, "What a rank holds".

use candle_core::DType;

use super::WeightFormat;
use crate::memory::{MemoryCategory, MemoryReport, MemoryUse};

/// Bytes of a gradient, and of the two moments of AdamW.
const GRADIENT_BYTES: usize = 4;
const MOMENT_BYTES: usize = 8;

/// A parameter of a model that is not built.
#[derive(Clone, Copy, Debug)]
pub struct PlannedParam<'a> {
    /// Global shape.
    pub shape: &'a [usize],
    /// Whether it gets a gradient and an optimizer's state.
    pub is_trained: bool,
    /// Whether it is of a block that is neither the model's first nor its last.
    pub is_inner: bool,
}

/// The most that training on one device is expected to hold, with AdamW, of a model with these parameters that computes in `dtype`, if its
/// tape holds so many bytes of `activations`. Matrices that are not trained are held in `frozen_format`, if there is one, which is for
/// models whose matrices are all of linear layers, embeddings and heads.
pub fn planned_memory<'a>(
    params: impl IntoIterator<Item = PlannedParam<'a>>,
    dtype: DType,
    frozen_format: Option<WeightFormat>,
    activations: usize,
) -> MemoryReport {
    let (mut weights, mut trained) = (0, 0);
    for param in params {
        let num_values: usize = param.shape.iter().product();
        if param.is_trained {
            trained += num_values;
        }
        weights += match (param.shape, frozen_format) {
            (&[rows, columns], Some(format)) if !param.is_trained => {
                format.num_bytes([rows, columns], param.is_inner)
            }
            _ => num_values * dtype.size_in_bytes(),
        };
    }
    let master_bytes = match dtype {
        // The rest of its f32.
        DType::BF16 => 2,
        DType::F16 => 4,
        _ => 0,
    };
    MemoryReport::new(|category| {
        let peak = match category {
            MemoryCategory::Weights => weights,
            MemoryCategory::Gradients => GRADIENT_BYTES * trained,
            MemoryCategory::Optimizer => (MOMENT_BYTES + master_bytes) * trained,
            MemoryCategory::Activations => activations,
            // Of several ranks.
            MemoryCategory::Gathered | MemoryCategory::Buffers => 0,
        };
        MemoryUse {
            now: 0,
            peak: peak as u64,
        }
    })
}
