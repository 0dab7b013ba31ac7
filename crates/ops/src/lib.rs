//! Differentiable fused operations that candle lacks.

/// Target id that marks a position without a target: it adds nothing to the loss and gets no gradient.
pub const IGNORE_INDEX: u32 = u32::MAX;
