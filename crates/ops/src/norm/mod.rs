//! Norms of rows.

pub(crate) mod layer_norm;
pub(crate) mod rms_norm;
pub(crate) mod row_norm;
#[cfg(feature = "cuda")]
pub(crate) mod row_norm_gpu;
