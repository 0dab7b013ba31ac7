//! Gradients that ranks outside of the mesh have computed.

use candle_core::Tensor;

/// Gradients that ranks outside of the mesh, workers, have computed, and what belongs to them: for
/// [`ReducedGradients::from_sums`](crate::ReducedGradients::from_sums).
#[derive(Clone, Debug)]
pub struct GradientSums {
    /// Of each bucket the sums at this rank's [ranges](crate::Parameters::own_ranges), f32.
    pub slices: Vec<Tensor>,
    /// Sum of the losses.
    pub loss_sum: f64,
    /// Number of their targets.
    pub num_targets: usize,
    /// What the gradient of the loss was multiplied by.
    pub loss_scale: f64,
    /// L2 norm of all gradients, of which these are slices, as they are; `None`: the ranks of the mesh add up what they have.
    pub norm: Option<f64>,
    /// Whether a worker asks to stop.
    pub asks_to_stop: bool,
}
