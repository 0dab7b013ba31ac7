//! Rows of a table by their numbers.

pub(crate) mod lookup;
#[cfg(feature = "cuda")]
pub(crate) mod lookup_gpu;
#[cfg(feature = "cuda")]
pub(crate) mod order_gpu;
