//! Linear layers: forward, their gradients, and the forms of their weights.

#[cfg(feature = "cuda")]
pub(crate) mod bias_gpu;
pub(crate) mod forward;
pub(crate) mod gguf_blocks;
pub(crate) mod grad;
#[cfg(feature = "cuda")]
pub(crate) mod linear_gpu;
pub(crate) mod weight;
