//! Differentiable fused operations that candle lacks.
//!
//! Every operation here has a forward that touches memory once and a hand-written backward, both on all cores and
//! both giving the same bits for any number of threads: work is cut into chunks that depend on the shape alone, and
//! partial sums are added in chunk order. Inputs are f32 tensors on the CPU; anything else is an error that names the
//! operation, the device and the dtype. Gradients are computed only for the inputs candle tracks.

#![deny(unsafe_code)]

mod attention;
mod chunks;
mod cross_entropy;
mod embedding;
mod exp;
mod head_groups;
mod host;
mod lanes;
mod linear;
mod matrix;
mod rms_norm;
mod rope;
mod swiglu;
mod vocab_shard;
mod with_backward;

pub use attention::causal_attention;
pub use cross_entropy::cross_entropy;
pub use embedding::embedding;
pub use head_groups::HeadGroups;
pub use linear::{linear, linear_bias_grad, linear_forward, linear_input_grad, linear_weight_grad};
pub use rms_norm::rms_norm;
pub use rope::rope;
pub use swiglu::swiglu;
pub use vocab_shard::{cross_entropy_grad, row_max, sum_exp_and_target_logit};
pub use with_backward::{OpOutput, with_backward1, with_backward2, with_backward3};

/// Target id that marks a position without a target: it adds nothing to the loss and gets no gradient.
pub const IGNORE_INDEX: u32 = u32::MAX;
