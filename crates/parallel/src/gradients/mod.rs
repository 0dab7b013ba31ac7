//! Gradients: f32, in flat buckets, summed over the ranks of the mesh under the backward pass.

mod accumulate;
mod reduce;
mod reduced;
mod shared;
mod transfer;

pub use accumulate::Gradients;
pub use reduced::{ReducedGradients, ReducedLoss};
