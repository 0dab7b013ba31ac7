//! Gradients: f32, in flat buckets, summed over the ranks of the mesh under the backward pass.

mod accumulate;
mod alike;
mod copies;
mod reduce;
mod reduced;
mod served;
mod shared;
mod squares;
mod sum_store;
mod transfer;

pub use accumulate::Gradients;
pub(crate) use reduced::UpdateNotice;
pub use reduced::{ReducedGradients, ReducedLoss};
pub use served::GradientSums;
