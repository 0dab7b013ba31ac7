//! Causal attention: whole sequences, packed documents, windows, and parts of keys.

#[cfg(feature = "cuda")]
pub(crate) mod backward_gpu;
pub(crate) mod blocks;
pub(crate) mod causal;
pub(crate) mod code;
#[cfg(feature = "cudnn")]
pub(crate) mod cudnn;
pub(crate) mod document_starts;
#[cfg(feature = "cuda")]
pub(crate) mod forward_gpu;
pub(crate) mod head_groups;
pub(crate) mod merge;
#[cfg(all(feature = "cuda", any(test, feature = "cudnn")))]
pub(crate) mod ragged;
#[cfg(any(test, feature = "cudnn"))]
pub(crate) mod rectangle;
pub(crate) mod runs;
pub(crate) mod spec;
