//! What is computed value by value, or block by block: activations, rotary positions, sums into memory, int8 and int4.

pub(crate) mod elements;
#[cfg(feature = "cuda")]
pub(crate) mod elements_gpu;
pub(crate) mod gated;
#[cfg(feature = "cuda")]
pub(crate) mod gated_gpu;
pub(crate) mod quantized;
#[cfg(feature = "cuda")]
pub(crate) mod quantized_gpu;
pub(crate) mod rope;
#[cfg(feature = "cuda")]
pub(crate) mod rope_gpu;
