//! What an optimizer's step computes: norms of gradients, AdamW, masters of bf16 weights.

pub(crate) mod adamw;
#[cfg(feature = "cuda")]
pub(crate) mod adamw_gpu;
pub(crate) mod master_remainder;
pub(crate) mod sums;
#[cfg(feature = "cuda")]
pub(crate) mod sums_gpu;
