//! Kernels of `kernels/`, compiled, loaded and launched on candle's stream, and the memory that they read and write.

#![allow(unsafe_code)]

pub(crate) mod adamw_slots;
#[cfg(feature = "cudnn")]
pub(crate) mod cudnn_library;
pub(crate) mod device;
pub(crate) mod element;
pub(crate) mod gpu;
pub(crate) mod kernel_files;
pub(crate) mod kernel_table;
pub(crate) mod launch;
pub(crate) mod library;
pub(crate) mod loaded;
pub(crate) mod pointer;
pub(crate) mod profile;
pub(crate) mod values;
